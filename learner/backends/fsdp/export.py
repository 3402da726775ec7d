"""Shards to full tensors under the names that Hugging Face files and inference engines use."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .ranks import full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = re.compile(r".*?\.\d+\.")
"""The decoder layer in a parameter's name."""

FILE_BYTES = 4 << 30
"""Size at which the next safetensors file begins."""


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


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
    """safetensors files of about 4 GiB at most and, if there are several, transformers' index of them."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(_parts(tensors), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    files = sorted(set(weight_map.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _parts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    yield part
