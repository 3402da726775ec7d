"""Shards to full tensors under the names that Hugging Face files and inference engines use."""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .sharding import full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = re.compile(r".*?\.\d+\.")
"""The decoder layer in a parameter's name."""


def hugging_face_tensors(model: "PreTrainedModel", dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `save_pretrained` would write, tied ones once. Collective: gathers a layer at a time.

       transformers holds a layer's experts as one tensor (`mlp.experts.gate_up_proj`), files and engines
    know each expert's own (`mlp.experts.0.gate_proj.weight`): its own table turns one into the other.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for _, block in itertools.groupby(_distinct(model), key=lambda item: _block(item[0])):
        gathered = {name: full(_rounded(tensor, dtype)) for name, tensor in block}
        yield from revert_weight_conversion(model, gathered).items()


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _distinct(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
