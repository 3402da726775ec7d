"""PPO's clip on the token ratio, with separate bounds."""

import torch

from algorithms.metrics import Metrics
from algorithms.ratios import token_ratio
from algorithms.tokens import Tokens

from .clipping import clipped_surrogate


def ppo_clip(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t = pi(y_t) / anchor(y_t).

    Source: PPO, equation 7, with GRPO's sequence advantage (arXiv:2402.03300, equation 3); 0.2 is PPO's, DAPO
    takes clip_high 0.28. Anchored to the behavior policy it is a trust region around the sampler, which
    includes the importance weight; anchored to the proximal policy it limits one batch's updates and says
    nothing of lag.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high)
