"""Mini-batches as transformers takes them: padded rows in order of arrival, or one packed row.

B rows, L longest, T tokens that are none of padding, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, concatenate, pack


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One forward pass, and the same tokens as the objective sees them."""

    token_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    is_token_BL: torch.Tensor
    """bool; padding stands at the right."""
    is_packed: bool
    batch: PackedBatch
    is_real: bool = True
    """Whether the rows count; False for rows that only keep ranks in step."""

    def idle(self) -> "Rows":
        """Return the same rows without a share of the loss."""
        return dataclasses.replace(self, is_real=False, batch=concatenate([]))

    def logprobs(self, model: Any, device: torch.device) -> torch.Tensor:
        """Return fp32 logprobs [T] with gradient, 0 for first tokens, by transformers' loss with full fp32 logits."""
        token_ids_BL, position_ids_BL = self.token_ids_BL.to(device), self.position_ids_BL.to(device)
        mask = {} if self.is_packed else {"attention_mask": self.is_token_BL.long().to(device)}
        logits_BLV = model(input_ids=token_ids_BL, position_ids=position_ids_BL, use_cache=False, **mask).logits.float()
        targets_BL = F.pad(token_ids_BL[:, 1:], (0, 1))
        losses_BL = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="none")
        next_BL = F.pad(-losses_BL.view_as(token_ids_BL)[:, :-1], (1, 0))
        return next_BL.where(position_ids_BL > 0, 0.0)[self.is_token_BL.to(device)]


def packed_rows(given: Sequence[PackableSequence], budget: int, rank: int, ranks: int) -> list[Rows]:
    """Return a rank's micro-batches of Headway's own packing; only the model around them differs."""
    batches = pack(given, rank, ranks, budget)
    stand_in = one_row(concatenate(given[:1])).idle()
    return [one_row(batch) if batch.num_tokens else stand_in for batch in batches]


def one_row(batch: PackedBatch) -> Rows:
    """Return the batch as one row."""
    return Rows(
        token_ids_BL=batch.token_ids_T[None],
        position_ids_BL=batch.position_ids_T[None],
        is_token_BL=torch.ones(1, batch.num_tokens, dtype=torch.bool),
        is_packed=True,
        batch=batch,
    )


def padded_rows(given: Sequence[PackableSequence], budget: int, rows: int | None, rank: int, ranks: int) -> list[Rows]:
    """Return a rank's mini-batches, dealt out in turn: `rows` at once, or (None) as many as stay within the budget.

    The budget counts padding. A rank that gets one less than another repeats one, as accelerate does, though without a
    loss.
    """
    dealt = [_padded(chosen) for chosen in _in_order(given, budget, rows)]
    missing = -len(dealt) % ranks
    return (dealt + [dealt[0].idle()] * missing)[rank::ranks]


def _in_order(given: Sequence[PackableSequence], budget: int, rows: int | None) -> Iterator[list[PackableSequence]]:
    chosen: list[PackableSequence] = []
    for sequence in given:
        longest = max(len(one.token_ids) for one in [*chosen, sequence])
        is_full = len(chosen) == rows if rows else (len(chosen) + 1) * longest > budget
        if chosen and is_full:
            yield chosen
            chosen = []
        chosen.append(sequence)
    yield chosen


def _padded(chosen: Sequence[PackableSequence]) -> Rows:
    batch = concatenate(chosen)
    lengths = batch.cu_seqlens.diff().long()
    is_token_BL = torch.arange(int(lengths.max())) < lengths[:, None]
    token_ids_BL = torch.zeros(is_token_BL.shape, dtype=torch.int64).masked_scatter(is_token_BL, batch.token_ids_T)
    return Rows(
        token_ids_BL=token_ids_BL,
        position_ids_BL=torch.arange(is_token_BL.shape[1]).expand_as(token_ids_BL),
        is_token_BL=is_token_BL,
        is_packed=False,
        batch=batch,
    )
