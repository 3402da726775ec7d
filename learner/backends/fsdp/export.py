"""Shards are gathered into full tensors under the names that Hugging Face files and inference engines use."""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .sharding import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = re.compile(r".*?\.\d+\.")
"""The decoder layer in a parameter's name."""


class HuggingFaceExport:
    """A model's tensors as `save_pretrained` would write them."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._unchanged: set[tuple[str, ...]] = set()
        """Blocks, as tuples of tensor names, that files name as the model does: transformers' conversion of one takes
        longer than the gathering. Tensors outside of all layers keep their names, too."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, tied ones once. Collective: gathers a layer at a time.

        transformers holds a layer's experts as one tensor (`mlp.experts.gate_up_proj`), but files and engines have
        one for each expert (`mlp.experts.0.gate_proj.weight`); transformers' own table converts them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for _, block in itertools.groupby(_distinct(self._model), key=lambda item: _block(item[0])):
            names, shards = zip(*block, strict=True)
            gathered = dict(zip(names, whole(shards, self._dtype), strict=True))
            if names in self._unchanged:
                yield from gathered.items()
                continue
            converted = revert_weight_conversion(self._model, gathered)
            if [*map(id, converted.values())] == [*map(id, gathered.values())] and [*converted] == [*gathered]:
                self._unchanged.add(names)
            yield from converted.items()


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _distinct(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
