"""One micro-batch as Megatron's layers take it: a packed row, padded until every rank gets an equal part.

T tokens, P positions with padding (fewer than T where sequences share tokens), C ranks that share them, D head width; K
candidates in the place of a token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from headway.learner.backends.moe import RecordedExperts
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.padding import Positions
from headway.learner.models.attention import PackedLayout, check_alignment


@dataclass
class MegatronRow(PackedSeqParams):
    """A padded row, which the layers get in the place of Megatron's own packing."""

    num_tokens: int = 0
    """T; 0 for the placeholder of an empty micro-batch."""
    token_ids_P: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    next_ids_P: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[P] the token that each position predicts; of no meaning where there is none."""
    cos_PD: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sin_PD: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    layout: PackedLayout | None = None
    recorded: RecordedExperts | None = None
    """The experts to replay for the P tokens; None: routers choose."""
    number: int = 0
    """The index of the micro-batch."""
    temperature: float = 1.0
    wants_hidden: bool = False
    top: int = 0
    """The number of likeliest tokens wanted in each place; 0: logprobs are."""
    next_candidates_PK: torch.Tensor | None = None
    """[P, K] the candidates for the place after each token; see `PackedBatch.candidates_TC`."""
    wants_confidence: bool = False
    """`PackedBatch.wants_confidence`."""

    has_previous_T: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[T] bool, False where a sequence begins."""
    predictor_T: torch.Tensor | None = None
    """[T] the position that predicts each token; None: it is the one before."""

    def at_next_token(self, next_P: torch.Tensor) -> torch.Tensor:
        """[T, ...] values of positions, moved to the tokens that they predict; 0 where a sequence begins."""
        is_tree = self.predictor_T is not None
        moved_T = next_P[self.predictor_T] if is_tree else next_P.roll(1, 0)[: self.num_tokens]
        return moved_T.where(self.has_previous_T.view(-1, *[1] * (next_P.dim() - 1)), 0.0)

    def part(self, values_P: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """[P / C] the part of rank `rank` of `size`."""
        return values_P.chunk(size)[rank]


def padded_length(num_tokens: int, multiple: int) -> int:
    """Return P, the next multiple of `multiple`, so that each rank has at least one token."""
    return max(num_tokens + -num_tokens % multiple, multiple)


def make_row(
    batch: PackedBatch, rotary: Any, length: int, tally_2: torch.Tensor, *, device: torch.device, varlen: bool
) -> MegatronRow:
    """Return a row of P = `length` positions. `rotary`: transformers' own module, with every kind of scaling.

    The padding is a sequence of its own at the row's end, whose results are dropped. `tally_2`: where routers that
    replay count disagreement.
    """
    positions = Positions.of(batch, length=length)
    if varlen and batch.tree is not None:
        check_alignment(device)

    def moved(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, non_blocking=True)

    position_ids = moved(positions.position_ids(batch))
    cos, sin = rotary(torch.empty((), device=device), position_ids[None])
    experts, candidates = batch.experts_TLK, batch.candidates_TC
    shares = None if experts is None else positions.shares(batch)
    return MegatronRow(
        qkv_format="thd",
        num_tokens=batch.num_tokens,
        token_ids_P=moved(positions.here(batch.token_ids_T)),
        next_ids_P=moved(positions.after(batch.token_ids_T)),
        cos_PD=cos[0],
        sin_PD=sin[0],
        layout=positions.layout(batch, varlen=varlen).moved(moved),
        recorded=None
        if experts is None
        else RecordedExperts(moved(positions.here(experts, -1)), tally_2, None if shares is None else moved(shares)),
        next_candidates_PK=None if candidates is None else moved(positions.after(candidates)),
        wants_confidence=batch.wants_confidence,
        has_previous_T=moved(batch.position_ids_T > 0),
        predictor_T=None if positions.tree is None else moved(positions.tree.predictor_T),
    )
