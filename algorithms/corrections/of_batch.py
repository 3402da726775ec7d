"""Statistics of the whole batch that some corrections need, as sums that add up over micro-batches and ranks.

    sums(policy_logprobs_T, tokens, **options) of all micro-batches, added up ─ settle(sums, **options) ─► an option

So an update's batch gives the same weights however it is cut into micro-batches. The logprobs are those that the
correction itself uses: of the current policy, before the update, or of the proximal one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from headway.algorithms.ratios import token_log_ratio, token_ratio
from headway.algorithms.tokens import Tokens

from .second_moment import is_outward

_SMALLEST, _LARGEST, _BINS = 1e-5, 20.0, 1 << 13
"""The range of |log r| and the number of its bins, each 0.2% wide."""


class BatchStatistic(NamedTuple):
    """The two functions of a correction: its sums over tokens, and the option that is computed from them."""

    sums: Callable[..., torch.Tensor]
    """(policy_logprobs_T, tokens, **options) -> [n] float64 sums, which are added over micro-batches and ranks."""
    settle: Callable[..., dict[str, float]]


def _weight_sums(policy_logprobs_T: torch.Tensor, tokens: Tokens, *, cap: float = 2.0) -> torch.Tensor:
    weights_T = token_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T).clamp(max=cap)
    return torch.stack([(weights_T * tokens.loss_mask_T).double().sum(), tokens.loss_mask_T.double().sum()])


def _mean_weight(sums: torch.Tensor, **_: Any) -> dict[str, float]:
    total, count = sums.tolist()
    return {"mean_weight": total / count if total else 1.0}


def _second_moments(policy_logprobs_T: torch.Tensor, tokens: Tokens, **_: Any) -> torch.Tensor:
    """Returns the count of outward tokens and the sum of their (log r)^2, by bins of |log r|."""
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    outward = log_ratio_T[is_outward(log_ratio_T, tokens.loss_mask_T, tokens.advantages_T)].double().abs().cpu()
    bins = torch.bucketize(outward, _edges()).clamp(max=_BINS - 1)
    counts = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, torch.ones_like(outward))
    squares = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, outward**2)
    return torch.cat([counts, squares])


def _limit(sums: torch.Tensor, *, budget: float = 0.04, **_: Any) -> dict[str, float]:
    """Returns the upper edge of the last bin up to which the mean square is within the budget; 0 if there is none."""
    counts, squares = sums.cpu().view(2, _BINS).cumsum(1)
    fits = (squares <= budget * counts).nonzero().flatten()
    return {"limit": float(_edges()[int(fits[-1])]) if fits.numel() else 0.0}


def _edges() -> torch.Tensor:
    """[BINS] the largest |log r| of each bin."""
    return torch.logspace(math.log10(_SMALLEST), math.log10(_LARGEST), _BINS, dtype=torch.float64)


OF_BATCH = {
    "self_normalized_is": BatchStatistic(_weight_sums, _mean_weight),
    "m2po": BatchStatistic(_second_moments, _limit),
}
"""Batch statistics by the name of the correction."""
