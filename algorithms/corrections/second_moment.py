"""M2PO: a trust region on the second moment of a batch's log ratios instead of on each ratio."""

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.ratios import token_log_ratio
from headway.algorithms.tokens import Tokens

from .masks import as_weights


def m2po(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    budget: float = 0.04,
    limit: float = -1.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = 0 if t is outward and |log r_t| > limit, else 1; r_t = pi(y_t) / mu(y_t), and the limit is the largest that
    keeps the mean of (log r_u)^2 over the outward u with |log r_u| <= limit within the budget.

    Anchored to the behavior policy; meant for an objective that does not clip. Outward are the tokens where
    PPO's clip could act: A > 0 and r > 1, or A < 0 and r < 1. Only they may be masked, the largest first. pi is the
    current policy, also beside an objective that is anchored to the proximal one, so every update of a step is held.

    The budget holds for the whole batch. With `limit` below 0 this function computes the limit of this micro-batch
    alone, which is the same only if the batch is one micro-batch; otherwise it may mask more tokens than the batch's
    mean requires. In a recipe the learner passes the limit of all tokens of an update, which it computes by a forward
    pass before the update, to 0.2% (`of_batch`); `m2po_threshold` is exact.

    Source: Zheng et al. 2025, "Prosperity before Collapse" (arXiv:2510.01161), algorithm 1; 0.04 is theirs.
    AReaL masks any trained token, whatever its advantage, by the proximal policy; the outward ones and the current
    policy are the paper's. Tokens with equal |log r| are masked together.
    """
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    is_outward_T = is_outward(log_ratio_T, tokens.loss_mask_T, tokens.advantages_T)
    largest = _threshold(log_ratio_T, is_outward_T, budget) if limit < 0 else limit
    weights_T, metrics = as_weights("m2po_masked_fraction", is_outward_T & (log_ratio_T.abs() > largest), tokens)
    before = masked_mean("m2po_second_moment", log_ratio_T**2, is_outward_T.to(tokens.loss_mask_T.dtype))
    return weights_T, {**metrics, **before}


def m2po_threshold(
    log_ratio_T: torch.Tensor, mask_T: torch.Tensor, advantages_T: torch.Tensor, *, budget: float = 0.04
) -> float:
    """limit = the largest |log r_t| for which mean((log r_u)^2 over outward u with |log r_u| <= |log r_t|) <= budget,
    or 0.

    The value for `limit` of `m2po` over a whole batch: pass `algorithms.ratios.token_log_ratio`, the loss mask and the
    advantages of all micro-batches and ranks, concatenated. O(T log T), waits for the device.

    Source: as `m2po`.
    """
    return float(_threshold(log_ratio_T, is_outward(log_ratio_T, mask_T, advantages_T), budget))


def is_outward(log_ratio_T: torch.Tensor, mask_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """A_t > 0 and log r_t > 0, or A_t < 0 and log r_t < 0, of trained tokens: [T] bool. PPO's clip acts nowhere else.

    Source: as `m2po`.
    """
    is_further_T = ((advantages_T > 0) & (log_ratio_T > 0)) | ((advantages_T < 0) & (log_ratio_T < 0))
    return is_further_T & (mask_T > 0)


def _threshold(log_ratio_T: torch.Tensor, is_outward_T: torch.Tensor, budget: float) -> torch.Tensor:
    """Scalar. The mean of the first n sorted squares never falls with n, so the last mean within the budget counts."""
    infinite = log_ratio_T.new_full((1,), torch.inf)
    sizes_T = torch.where(is_outward_T, log_ratio_T.abs(), infinite).sort().values
    counts_T = torch.arange(1, sizes_T.numel() + 1, device=sizes_T.device)
    fits_T = (sizes_T.double() ** 2).cumsum(0) / counts_T <= budget
    is_last_of_equals_T = sizes_T < torch.cat([sizes_T[1:], infinite[: sizes_T.numel()]])
    kept_T = torch.where(fits_T & is_last_of_equals_T, sizes_T, torch.zeros_like(sizes_T))
    return torch.cat([kept_T, log_ratio_T.new_zeros(1)]).max()
