"""The bindings of `mapping` with the ranks that hold each part of the model.

`Exporter` gathers the model's tensors by Hugging Face name from the ranks that hold parts.

Every rank lists all of them in the same order, and calls the collective functions for each of them in that order.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError
from headway.learner.backends.hugging_face_files import Read
from headway.learner.config import LayoutConfig

from . import groups
from .mapping import HEAD, Architecture, Binding, embedding, last_bindings, layer_bindings
from .model import PackedGpt


@dataclass(frozen=True)
class PlacedBinding:
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


def places(architecture: Architecture, layout: LayoutConfig) -> Iterator[PlacedBinding]:
    """Yield the bindings of the whole model in the order of its layers; the same on every rank."""
    last_stage, last_chunk = layout.pipeline - 1, layout.virtual_pipeline - 1
    yield PlacedBinding(embedding(architecture), 0, 0)
    per_rank = architecture.experts // layout.expert
    for layer in range(architecture.layers):
        stage, chunk, local = layer_position(architecture, layout, layer)
        for binding in layer_bindings(architecture, layer, local):
            rank, slot = (None, None) if binding.expert is None else divmod(binding.expert, per_rank)
            yield PlacedBinding(binding, stage, chunk, rank, slot)
    for binding in last_bindings(architecture):
        yield PlacedBinding(binding, last_stage, last_chunk)
    if architecture.has_tied_head and layout.pipeline > 1:
        yield PlacedBinding(embedding(architecture, HEAD), last_stage, last_chunk, is_copy=True)


class Exporter:
    """Gathers each part of the model on one rank that holds it, and broadcasts it from there."""

    def __init__(self, chunks: Sequence[PackedGpt], all_places: Sequence[PlacedBinding]) -> None:
        self._chunks = chunks
        self._places = [place for place in all_places if not place.is_copy]
        self._holders = _coordinates(next(chunks[0].parameters()).device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors on every rank. Collective."""
        return self.tensors(self._places)

    def tensors(self, places: Iterable[PlacedBinding]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield some tensors on every rank. Collective. Consecutive tensors of the same ranks are sent together."""
        for (stage, expert_rank), run in itertools.groupby(places, key=lambda at: (at.stage, at.expert_rank)):
            held = list(run)
            names = [name for place in held for name in place.binding.names]
            yield from zip(names, self._sent(held, self._speaker(stage, expert_rank)), strict=True)

    @torch.no_grad()
    def _sent(self, held: Sequence[PlacedBinding], speaker: int) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        if held[0].is_here:
            for place in held:
                parameter = self._chunks[place.chunk].get_parameter(place.binding.parameter)
                tensors += place.join(place.view(parameter.detach()))
        if dist.get_world_size() == 1:
            return tensors
        some = next(self._chunks[0].parameters())
        shapes = [shape for place in held for shape in place.binding.shapes]
        sizes = [math.prod(shape) for shape in shapes]
        if dist.get_rank() == speaker:
            buffer = torch.cat([tensor.flatten() for tensor in tensors])
        else:
            buffer = torch.empty(sum(sizes), dtype=some.dtype, device=some.device)
        dist.broadcast(buffer, src=speaker)
        return [part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True)]

    def _speaker(self, stage: int, expert_rank: int | None) -> int:
        return next(
            rank
            for rank, (its_stage, its_expert_rank) in enumerate(self._holders)
            if its_stage == stage and expert_rank in (None, its_expert_rank)
        )


def _coordinates(device: torch.device) -> list[tuple[int, int]]:
    """Return (pipeline stage, expert-parallel rank) of every rank. Collective."""
    own = [groups.pipeline().rank(), groups.expert().rank()]
    mine = torch.tensor(own, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return [(int(stage), int(expert)) for stage, expert in torch.stack(everyones).tolist()]
