"""Safetensors files into shards, one tensor at a time: no process ever holds a whole model.

    meta_model ─► the model without memory for its parameters ─► sharded ─► fill_shards copies this rank's parts

transformers' own table says how a file's tensors become a model's: it stacks experts, renames, and more.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from broker.errors import ConfigError
from learner.config import ModelConfig
from learner.model import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX = "model.safetensors.index.json"

Reader = Callable[[], torch.Tensor]
"""Reads one tensor of a file, whole, in its own number format."""


def can_stream(model: ModelConfig) -> bool:
    """Whether `model.path` has safetensors whose numbers are the weights, not quantized ones."""
    if model.random is not None or getattr(load_config(model), "quantization_config", None) is not None:
        return False
    return bool(_files(model.path))


@functools.cache
def _files(path: str) -> tuple[Path, ...]:
    """The safetensors of a directory or hub id, downloaded first if they must be; none where there are others only."""
    from huggingface_hub import snapshot_download

    directory = Path(path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(path, allow_patterns=["model*.safetensors", INDEX]))
        except OSError:  # transformers, which reads other formats too, says what is wrong
            return ()
    if (directory / INDEX).exists():
        names = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
        return tuple(directory / name for name in sorted(names))
    return tuple(directory.glob("model.safetensors"))


def meta_model(model: ModelConfig) -> "PreTrainedModel":
    """Parameters on the meta device, buffers (rotary frequencies) computed."""
    from transformers import AutoModelForCausalLM

    config = load_config(model)
    with _meta_parameters():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Each parameter goes to the meta device once it is made; a tied one, which is there, stays the same object."""

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
    """Memory for what lies on the meta device, its contents undefined."""

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    module._apply(allocated)  # type: ignore[no-untyped-call]


@torch.no_grad()
def fill_shards(model: "PreTrainedModel", path: str) -> None:
    """Raises ConfigError where files lack a weight or have one of another shape.

    What still lies on the meta device, such as the head of a critic's model, is left out.
    """
    shards = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta}
    filled: set[int] = set()
    for name, weight in _converted(model, _readers(path), shards):
        _copy(path, name, weight, shards[name])
        filled.add(id(shards[name]))
    if lacking := [name for name, shard in shards.items() if id(shard) not in filled]:
        raise ConfigError(
            f"model.path: {path} lacks {len(lacking)} weights of a {type(model).__name__}: {lacking[:5]}."
        )


def _copy(path: str, name: str, weight: torch.Tensor, shard: torch.Tensor) -> None:
    """This rank's rows of a weight, in the shard's number format."""
    if weight.shape != shard.shape:
        raise ConfigError(
            f"model.path: {path} has {name} of shape {list(weight.shape)}, config.json says {list(shard.shape)}."
        )
    if not isinstance(shard, DTensor):
        shard.copy_(weight)
        return
    mesh = shard.device_mesh
    rows = weight.chunk(mesh.size())[mesh.get_local_rank() :][:1]  # the last ranks of a small weight have none
    for mine in rows:
        shard.to_local().copy_(mine)


def _readers(path: str) -> dict[str, Reader]:
    """By the names that the files use; nothing is read yet."""
    from safetensors import SafetensorError, safe_open

    try:
        files = [safe_open(file, framework="pt") for file in _files(path)]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.path: {path} cannot be loaded: {error}.") from error
    names = [(name, file) for file in files for name in file.keys()]  # type: ignore[no-untyped-call]  # noqa: SIM118
    return {name: functools.partial(file.get_tensor, name) for name, file in names}


def _converted(
    model: "PreTrainedModel", readers: Mapping[str, Reader], wanted: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The files' tensors under the model's names, each read when its turn comes, and only those of one weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key

    table = get_model_conversion_mapping(model)
    named = model.state_dict(keep_vars=True)
    transforms: dict[str, Any] = {}
    for name in sorted(readers, key=dot_natural_key):
        target, pattern = _renamed(model, name, table, named)
        if target in wanted:
            transform = transforms.setdefault(target, _transform(table, name, target, pattern))
            transform.add_tensor(target, name, pattern or name, readers[name])
    model._weight_conversions = [transform for transform in table if transform.was_used()]  # saving reverts these
    for target, transform in transforms.items():
        for name, weight in transform.convert(target, model=model, config=model.config).items():
            yield name, weight[0] if isinstance(weight, list) else weight


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
