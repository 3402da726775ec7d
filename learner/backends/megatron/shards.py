"""The bindings of `mapping` with the ranks that hold each part of the model.

Every rank lists all of them in the same order, and calls the collective functions for each of them in that order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError
from headway.learner.backends.hugging_face_files import Read
from headway.learner.config import LayoutConfig

from . import groups
from .architecture import Architecture
from .mapping import HEAD, Binding, embedding, last_bindings, layer_bindings


@dataclass(frozen=True)
class HeldBinding:
    """A binding with the ranks that hold it."""

    binding: Binding
    stage: int
    """The pipeline stage."""
    chunk: int
    """The index of the chunk among those that the stage interleaves."""
    expert_rank: int | None = None
    """The expert-parallel rank that holds it; None: all of them do."""
    slot: int | None = None
    """The index of the expert among that rank's experts."""
    is_copy: bool = False
    """True for a tied head on another stage than the embedding that it equals."""

    @property
    def is_here(self) -> bool:
        """True if this rank holds it, or a part of it."""
        return self.stage == groups.pipeline().rank() and self.expert_rank in (None, groups.expert().rank())

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the parameter with this one."""
        return groups.tensor() if self.binding.group == "tensor" else groups.expert_tensor()

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this binding's part of a tensor shaped like the parameter."""
        return parameter if self.slot is None else parameter[self.slot]

    def split(self, read: Read) -> torch.Tensor:
        """Return this rank's part of the Hugging Face tensors. Raises ConfigError where one has another shape."""
        group, binding = self.group, self.binding
        tensors = tuple(_read_as(read, name, shape) for name, shape in zip(binding.names, binding.shapes, strict=True))
        return binding.sharing.split(tensors, group.size(), group.rank())

    def join(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the Hugging Face tensors, joined from all ranks that share them. Collective over those."""
        group = self.group
        parts = [part]
        if group.size() > 1:
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
        return self.binding.sharing.join(parts)


def _read_as(read: Read, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = read(name)
    if tensor.shape != shape:
        raise ConfigError(f"{name} has the shape {list(tensor.shape)}, the model's is {list(shape)}.")
    return tensor


def layer_position(architecture: Architecture, layout: LayoutConfig, layer: int) -> tuple[int, int, int]:
    """Return a layer's stage, its chunk there, and its index in that chunk."""
    part, local = divmod(layer, architecture.layers // (layout.pipeline * layout.virtual_pipeline))
    chunk, stage = divmod(part, layout.pipeline)
    return stage, chunk, local


def places(architecture: Architecture, layout: LayoutConfig) -> Iterator[HeldBinding]:
    """Yield the bindings of the whole model in the order of its layers; the same on every rank."""
    last_stage, last_chunk = layout.pipeline - 1, layout.virtual_pipeline - 1
    yield HeldBinding(embedding(architecture), 0, 0)
    per_rank = architecture.experts // layout.expert
    for layer in range(architecture.layers):
        stage, chunk, local = layer_position(architecture, layout, layer)
        for binding in layer_bindings(architecture, layer, local):
            rank, slot = (None, None) if binding.expert is None else divmod(binding.expert, per_rank)
            yield HeldBinding(binding, stage, chunk, rank, slot)
    for binding in last_bindings(architecture):
        yield HeldBinding(binding, last_stage, last_chunk)
    if architecture.has_tied_head and layout.pipeline > 1:
        yield HeldBinding(embedding(architecture, HEAD), last_stage, last_chunk, is_copy=True)
