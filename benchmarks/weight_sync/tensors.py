"""A model's random tensors by their Hugging Face names, as a learner publishes them, of one GPU or in shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.throughput.shapes import Shape
from headway.learner.backends.fsdp.backend import HuggingFaceExport
from headway.learner.backends.fsdp.sharding import local
from headway.rollout_workers.engines.weight_loading.named_tensors import one_by_one

Named = tuple[str, torch.Tensor]
SCALE = 0.02
_SLAB_BYTES = 1 << 30


def write_config(shape: Shape, directory: Path) -> Path:
    """Write config.json alone: engines start with random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return directory


class Whole:
    """All tensors on one device."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = random_tensors(directory, dtype, device)

    def step(self) -> None:
        """Replace every tensor's numbers by others of the same size."""
        step(self._tensors)

    def named(self) -> Iterator[Named]:
        return iter(self._tensors)


class Sharded:
    """Tensors sharded over the default process group by FSDP2, and gathered layer by layer as in the learner."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        model = _meta_model(directory, dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device=device)
        self._export = HuggingFaceExport(model, dtype)
        self._shards = [(name, local(shard.detach())) for name, shard in model.named_parameters()]
        for name, shard in self._shards:
            shard.normal_(1.0 if "norm" in name else 0.0, SCALE)

    def step(self) -> None:
        """Replace every tensor's numbers by others of the same size."""
        step(self._shards)

    def named(self) -> Iterator[Named]:
        """Yield the whole tensors. Collective."""
        return self._export.tensors()


def layout(directory: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes as checkpoints have them: experts one by one, a tied head left out."""
    named = [(name, parameter.detach()) for name, parameter in _meta_model(directory, torch.float32).named_parameters()]
    return [(name, tuple(tensor.shape)) for name, tensor in one_by_one(named)]


def random_tensors(directory: Path, dtype: torch.dtype, device: torch.device) -> list[Named]:
    """Return tensors in which norms are near 1, and all else is near 0."""
    torch.manual_seed(0)
    slabs = _Slabs(dtype, device)
    named = [(name, slabs.take(shape)) for name, shape in layout(directory)]
    for name, tensor in named:
        if "norm" in name:
            tensor.add_(1.0)
    return named


def _meta_model(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)


def step(tensors: list[Named]) -> None:
    """Replace a tensor's numbers by others of the same size: the order of its columns changes."""
    for _, tensor in tensors:
        tensor.copy_(tensor.flip(-1))


class _Slabs:
    """Tensors cut from large random pieces, so that tens of thousands of small ones are made in a second."""

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
