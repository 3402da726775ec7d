"""A check whether a packed row of transformers lets one sequence see another; transformers does not report it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from headway.learner.batching.packing import PackableSequence, concatenate

from .rows import one_row

TOLERATED = 0.1
"""The tolerated share of the change that a leak would cause; bfloat16's rounding stays far below."""


@torch.no_grad()
def leak_of(model: Any, given: Sequence[PackableSequence], device: torch.device) -> dict[str, Any]:
    """Return how far the logprobs of a sequence move (greatest difference) when another stands before it in its row.

    The result also has how far they would move if it were seen, from the same row as a single sequence. Collective.
    """
    first, second = sorted(given, key=lambda sequence: len(sequence.token_ids))[:2]
    row, start = one_row(concatenate([first, second])), len(first.token_ids)
    as_one = dataclasses.replace(row, position_ids_BL=torch.arange(row.batch.num_tokens)[None])
    alone_T = one_row(concatenate([second])).logprobs(model, device)[1:]
    packed_T, seen_T = (rows.logprobs(model, device)[start + 1 :] for rows in (row, as_one))
    moved, would_move = (float((logprobs_T - alone_T).abs().max()) for logprobs_T in (packed_T, seen_T))
    return {
        "moved": round(moved, 5),
        "would_move_if_seen": round(would_move, 5),
        "leaks": moved > TOLERATED * would_move,
    }
