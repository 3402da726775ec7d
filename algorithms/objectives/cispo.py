"""CISPO: the bound is on the importance weight, so no token loses its gradient."""

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens

from .clipping import weighted_log_likelihood


def cispo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t), r_t = pi(y_t) / anchor(y_t).

    sg stops the gradient. Unlike PPO's clip, a bound limits a token's weight and never silences it, and it does not
    ask for the advantage's sign. Anchored to the behavior policy the weight is a truncated importance weight; beside
    it no other correction of the same ratio belongs. `clip_fraction`: trained tokens whose weight is at a bound.

    Source: MiniMax-M1, Chen et al. 2025 (arXiv:2506.13585), equations 4 and 5. The paper sets no lower bound, here
    clip_low 1, and tunes the upper one without giving it. ScaleRL (arXiv:2510.13786) truncates at 4, 5 or 8 and finds
    little difference; torchtitan's clip_high is 4 (a cap of 5), as here. Trinity's is 0.28. TRL's
    epsilon_high is the cap itself, 1 + clip_high here.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    losses_T = weighted_log_likelihood(ratio_T.clamp(1 - clip_low, 1 + clip_high), current_logprobs_T, tokens)
    is_capped_T = (ratio_T < 1 - clip_low) | (ratio_T > 1 + clip_high)
    return losses_T, share("clip_fraction", is_capped_T, tokens)
