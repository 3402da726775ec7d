"""The model's tensors by Hugging Face name: gathered from the ranks that hold parts, and sent to all others."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from . import groups
from .model import PackedGpt
from .shards import HeldBinding


class Exporter:
    """Gathers each part of the model on one rank that holds it, and broadcasts it from there."""

    def __init__(self, chunks: Sequence[PackedGpt], all_places: Sequence[HeldBinding]) -> None:
        self._chunks = chunks
        self._places = [place for place in all_places if not place.is_copy]
        self._holders = _coordinates(next(chunks[0].parameters()).device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors on every rank. Collective."""
        return self.tensors(self._places)

    def tensors(self, places: Iterable[HeldBinding]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield some tensors on every rank. Collective. Consecutive tensors of the same ranks are sent together."""
        for (stage, expert_rank), run in itertools.groupby(places, key=lambda at: (at.stage, at.expert_rank)):
            held = list(run)
            names = [name for place in held for name in place.binding.names]
            yield from zip(names, self._sent(held, self._speaker(stage, expert_rank)), strict=True)

    @torch.no_grad()
    def _sent(self, held: Sequence[HeldBinding], speaker: int) -> list[torch.Tensor]:
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
