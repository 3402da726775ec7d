"""Tensors by Hugging Face name into the files that `from_pretrained` reads."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

FILE_BYTES = 4 << 30
"""Size at which the next safetensors file begins."""


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
