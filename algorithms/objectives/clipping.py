"""Primitives of the objectives: the pessimistic clipped surrogate and the weighted log-likelihood."""

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.tokens import Tokens


def clipped_surrogate(
    ratio_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), and for A_t < 0 at most -dual_clip A_t.
    Shapes [T]; dual_clip 0 is none.

    Reports `clip_fraction`: trained tokens whose gradient a bound took away, so A > 0 above 1 + clip_high, A < 0
    below 1 - clip_low or above dual_clip.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; two bounds: DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 10; dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    advantages_T = tokens.trained_advantages
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    is_clipped_T = is_beyond(ratio_T, advantages_T, low=1 - clip_low, high=1 + clip_high)
    if dual_clip > 0:
        is_dual_T = (advantages_T < 0) & (ratio_T > dual_clip)
        losses_T = torch.where(is_dual_T, -dual_clip * advantages_T, losses_T)
        is_clipped_T = is_clipped_T | is_dual_T
    return losses_T, share("clip_fraction", is_clipped_T, tokens)


def is_beyond(ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """[T] bool: the update would move the ratio further out of [low, high] on the side where it already is."""
    return ((ratio_T > high) & (advantages_T > 0)) | ((ratio_T < low) & (advantages_T < 0))


def weighted_log_likelihood(weights_T: torch.Tensor, current_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """[T] loss_t = -sg(w_t) A_t log pi(y_t); 0 and without gradient where the mask is 0. sg stops the gradient.

    With w_t = r_t its gradient is that of -r_t A_t, but no bound on w_t takes it away.
    """
    is_trained_T = tokens.loss_mask_T > 0
    logprobs_T = torch.where(is_trained_T, current_logprobs_T, torch.zeros_like(current_logprobs_T))
    return -weights_T.detach() * tokens.trained_advantages * logprobs_T
