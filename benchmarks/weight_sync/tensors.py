"""A model's tensors by their Hugging Face names, random, on one device: what a learner would publish."""

import json
from pathlib import Path

import torch

from benchmarks.throughput.shapes import Shape
from rollout_workers.engines.loading import one_by_one

SCALE = 0.02
_SLAB_BYTES = 1 << 30


def write_config(shape: Shape, directory: Path) -> Path:
    """config.json alone: engines start with random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return directory


def layout(directory: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as checkpoints have them: experts one by one, a tied head left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return [(name, tuple(tensor.shape)) for name, tensor in one_by_one(named)]


def random_tensors(directory: Path, dtype: torch.dtype, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Norms are near 1, all else near 0."""
    torch.manual_seed(0)
    slabs = _Slabs(dtype, device)
    named = [(name, slabs.take(shape)) for name, shape in layout(directory)]
    for name, tensor in named:
        if "norm" in name:
            tensor.add_(1.0)
    return named


def step(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Other numbers of the same size in every tensor: the order of the columns."""
    for _, tensor in tensors:
        tensor.copy_(tensor.flip(-1))


class _Slabs:
    """Tensors cut from large random pieces: tens of thousands of small ones are made in a second."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._options = {"dtype": dtype, "device": device}
        self._left = torch.empty(0, dtype=dtype, device=device)

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        if count > self._left.numel():
            size = max(count, _SLAB_BYTES // self._left.element_size())
            self._left = torch.randn(size, **self._options).mul_(SCALE)  # type: ignore[call-overload]
        taken, self._left = self._left[:count], self._left[count:]
        return taken.view(shape)
