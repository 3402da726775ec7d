"""Shards are gathered into full tensors under the names that Hugging Face files and inference engines use."""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from headway.learner.models.adapters import is_factor, merged, peft_names, to_peft

from .adapters import Adapters
from .sharding import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
