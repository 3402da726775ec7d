"""One micro-batch as Megatron's layers take it: a packed row of tokens, padded until every rank gets an equal part.

T real tokens, P >= T padded ones, C ranks that share them, D head width; K candidates in the place of a token.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from learner.backends.replayed_choice import Recorded
from learner.models.attention import PackedLayout
from learner.rows.batch import PackedBatch


@dataclass
class MegatronRow(PackedSeqParams):
    """A padded row, which the layers get in the place of Megatron's own packing."""

    num_tokens: int = 0
    """T; 0 for the placeholder of an empty micro-batch."""
    token_ids_P: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    position_ids_P: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    cos_PD: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sin_PD: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    layout: PackedLayout | None = None
    recorded: Recorded | None = None
    """The experts to replay for the P tokens; None: routers choose."""
    number: int = 0
    """The index of the micro-batch."""
    temperature: float = 1.0
    wants_hidden: bool = False
    top: int = 0
    """The number of likeliest tokens wanted in each place; 0: logprobs are."""
    candidates_PK: torch.Tensor | None = None
    """[P, K] `PackedBatch.candidates_TC`."""
    wants_confidence: bool = False
    """`PackedBatch.wants_confidence`."""

    def part(self, values_P: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """[P / C] the part of rank `rank` of `size`."""
        return values_P.chunk(size)[rank]


def padded_length(num_tokens: int, multiple: int) -> int:
    """Return P, the next multiple of `multiple`, so that each rank has at least one token."""
    return max(num_tokens + -num_tokens % multiple, multiple)


def make_row(
    batch: PackedBatch, rotary: Any, length: int, tally_2: torch.Tensor, *, device: torch.device, varlen: bool
) -> MegatronRow:
    """Return a row of P = `length` tokens. `rotary`: transformers' own module, with every kind of scaling.

    The padding is a sequence of its own at the row's end, whose results are dropped. `tally_2`: where routers that
    replay count disagreement.
    """
    token_ids, positions, ends = batch.token_ids_T, batch.position_ids_T, batch.cu_seqlens
    experts, candidates = batch.experts_TLK, batch.candidates_TC
    if missing := length - batch.num_tokens:
        token_ids = F.pad(token_ids, (0, missing))
        positions = torch.cat([positions, torch.arange(missing, device=positions.device)])
        ends = torch.cat([ends, ends[-1:] + missing])
        experts = None if experts is None else F.pad(experts, (0, 0, 0, 0, 0, missing), value=-1)
        candidates = None if candidates is None else F.pad(candidates, (0, 0, 0, missing))
    layout = PackedLayout.of(ends, varlen=varlen)
    positions = positions.to(device, non_blocking=True)
    cos, sin = rotary(torch.empty((), device=device), positions[None])
    return MegatronRow(
        qkv_format="thd",
        num_tokens=batch.num_tokens,
        token_ids_P=token_ids.to(device, non_blocking=True),
        position_ids_P=positions,
        cos_PD=cos[0],
        sin_PD=sin[0],
        layout=on_device(layout, device),
        recorded=None if experts is None else Recorded(experts.to(device, non_blocking=True), tally_2),
        candidates_PK=None if candidates is None else candidates.to(device, non_blocking=True),
        wants_confidence=batch.wants_confidence,
    )


def on_device(layout: PackedLayout, device: torch.device) -> PackedLayout:
    """Move a layout to the device. It was computed on the CPU, where sizes are known without waiting for a GPU."""
    buckets = layout.buckets
    if buckets is not None:
        buckets = dataclasses.replace(buckets, gather=buckets.gather.to(device), places=buckets.places.to(device))
    return dataclasses.replace(layout, cu_seqlens=layout.cu_seqlens.to(device, non_blocking=True), buckets=buckets)
