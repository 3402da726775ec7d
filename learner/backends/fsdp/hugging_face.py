"""Hugging Face names: safetensors files are read into shards one tensor at a time, so no process holds a whole model;
shards are gathered as `save_pretrained` would write them.

    meta_model ─► the model without memory for its parameters ─► sharded ─► fill_shards copies this rank's parts

transformers' own table says how a file's tensors become a model's: it stacks experts, renames, and more.
"""

import copy
import functools
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from headway.broker.errors import ConfigError
from headway.learner.backends.adapter import Weights, open_weights
from headway.learner.backends.hugging_face_files import check_tied
from headway.learner.backends.quantization import QuantizedBase
from headway.learner.config import ModelConfig
from headway.learner.models.lora import is_factor, merged, peft_names, to_peft
from headway.learner.models.pretrained import built, load_config

from .adapter import Adapters
from .sharding import copy_rows, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)
PASSED_OVER = (r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$", r"attention\.(masked_)?bias$")
"""Tensors that older files have, and that models compute by themselves."""


def can_stream(model: ModelConfig) -> bool:
    """Return whether `model.path` has safetensors files of weights that are not quantized."""
    if model.random is not None or getattr(load_config(model), "quantization_config", None) is not None:
        return False
    return open_weights(model.path) is not None


def meta_model(model: ModelConfig) -> "PreTrainedModel":
    """Return the model with parameters on the meta device and buffers (rotary frequencies) computed."""
    with _meta_parameters():
        return built(load_config(model))


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """A context in which each new parameter moves to the meta device; a tied one, already there, stays the same
    object."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def allocate_shards(module: nn.Module, device: torch.device) -> None:
    """Allocate memory, with undefined contents, for tensors on the meta device. Tied parameters stay tied."""

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    module._apply(allocated)  # type: ignore[no-untyped-call]
    for (first, name), *others in places.values():
        for part, other in others:  # without shards it has made a parameter for each place
            setattr(part, other, getattr(first, name))


@torch.no_grad()
def fill_shards(model: "PreTrainedModel", path: str, quantized: QuantizedBase | None = None) -> None:
    """Copy the files' weights into the shards, and quantize those that are `quantized`. Raises ConfigError for a weight
    that is missing or has another shape.

    Parameters that still lie on the meta device, such as the head of a critic's model, are left out.
    """
    named = model.state_dict(keep_vars=True)
    shards = {name: tensor for name, tensor in named.items() if not (tensor.is_meta or is_factor(name))}
    apart = {} if quantized is None else quantized.placeholders()
    shards |= apart
    filled: set[int] = set()
    weights = open_weights(path)
    assert weights is not None, "can_stream has looked"
    for head, embedding in getattr(model, "all_tied_weights_keys", {}).items():
        check_tied(weights.names, weights, head, embedding)
    for name, weight in _converted(model, weights, named | apart, shards):
        if quantized is not None and name in apart:
            quantized.put(name, weight)
        else:
            _copy(path, name, weight, shards[name])
        filled.add(id(shards[name]))
    if lacking := [name for name, shard in shards.items() if id(shard) not in filled]:
        raise ConfigError(
            f"model.path: {path} lacks {len(lacking)} weights of a {type(model).__name__}: {lacking[:5]}."
        )


def _copy(path: str, name: str, weight: torch.Tensor, shard: torch.Tensor) -> None:
    if weight.shape != shard.shape:
        raise ConfigError(
            f"model.path: {path} has {name} of shape {list(weight.shape)}, config.json says {list(shard.shape)}."
        )
    copy_rows(weight, shard)


def _converted(
    model: "PreTrainedModel", files: Weights, named: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the files' tensors under the model's names; only the tensors of one weight are in memory at once."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key

    table = get_model_conversion_mapping(model)
    transforms: dict[str, Any] = {}
    unknown: list[str] = []
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = _renamed(model, name, table, named)
        if target in wanted:
            transform = transforms.setdefault(target, _transform(table, name, target, pattern))
            transform.add_tensor(target, name, pattern or name, functools.partial(files, name))
        elif target not in named:
            unknown.append(name)
    _warn_of_unknown(model, unknown)
    model._weight_conversions = [transform for transform in table if transform.was_used()]  # saving reverts these
    for target, transform in transforms.items():
        for name, weight in transform.convert(target, model=model, config=model.config).items():
            yield name, weight[0] if isinstance(weight, list) else weight


def _warn_of_unknown(model: "PreTrainedModel", names: list[str]) -> None:
    """Tell which of the files' tensors the model has no place for, but for those that transformers passes over, too."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *PASSED_OVER]
    if unknown := [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]:
        log.warning(
            "model.path: its files have %d tensors that a %s of its config.json has no place for, such as %s: they are"
            " left out. Is num_hidden_layers right, and this no part of a larger model?",
            len(unknown),
            type(model).__name__,
            ", ".join(unknown[:3]),
        )


def _renamed(
    model: "PreTrainedModel", name: str, table: list[Any], named: Mapping[str, torch.Tensor]
) -> tuple[str, str | None]:
    """(the weight's name in the model, the pattern of the conversion that it takes part in)"""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, named)
    if target not in named and name in named:
        return name, None
    return target, pattern


def _transform(table: list[Any], name: str, target: str, pattern: str | None) -> Any:
    from transformers.core_model_loading import WeightRenaming

    if pattern is None:
        return WeightRenaming(name, target)
    return copy.deepcopy(next(entry for entry in table if pattern in entry.source_patterns))


BLOCK = re.compile(r".*?\.\d+\.")
"""The decoder layer in a parameter's name."""


class HuggingFaceExport:
    """A model's tensors as `save_pretrained` would write them."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype, adapters: Adapters | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self._adapters = adapters
        self._unchanged: set[tuple[str, ...]] = set()
        """Blocks, as tuples of tensor names, that files name as the model does: transformers' conversion of one takes
        longer than the gathering. Tensors outside of all layers keep their names, too."""

    def tensors(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, tied ones once, with its adapter merged into it unless not `is_merged`. Collective:
        gathers a layer at a time.

        transformers holds a layer's experts as one tensor (`mlp.experts.gate_up_proj`), but files and engines have
        one for each expert (`mlp.experts.0.gate_proj.weight`); transformers' own table converts them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        base = None if self._adapters is None else self._adapters.base
        for prefix, block in itertools.groupby(_distinct(self._model), key=lambda item: _block(item[0])):
            names, shards = zip(*block, strict=True)
            named = dict(zip(names, whole(shards, self._dtype), strict=True))
            if base is not None and prefix:
                named |= base.of_block(prefix)
            gathered = self._of_files(named, is_merged)
            names = tuple(gathered)
            if names in self._unchanged:
                yield from gathered.items()
                continue
            converted = revert_weight_conversion(self._model, gathered)
            if [*map(id, converted.values())] == [*map(id, gathered.values())] and [*converted] == [*gathered]:
                self._unchanged.add(names)
            yield from converted.items()

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by their names in PEFT's files. Collective."""
        assert self._adapters is not None
        names = peft_names(self._adapters.targets)
        for target, shards in self._adapters.factors():
            factors = to_peft(target, *whole(shards, self._dtype))
            yield from zip(names[target.parameter], factors, strict=True)

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by the model's names. Collective."""
        assert self._adapters is not None
        for target, shards in self._adapters.factors():
            yield from zip(target.factors, whole(shards, self._dtype), strict=True)

    def _of_files(self, gathered: dict[str, torch.Tensor], is_merged: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of a block without A and B, which have changed the others if `is_merged`."""
        if self._adapters is None:
            return gathered
        changed = {name: tensor for name, tensor in gathered.items() if not is_factor(name)}
        for target in self._adapters.targets:
            if is_merged and target.parameter in changed:
                first, second = (gathered[name] for name in target.factors)
                changed[target.parameter] = merged(
                    changed[target.parameter], (first, second), self._adapters.config.scale
                )
        return changed


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _distinct(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
