"""The pessimistic clipped surrogate, shared by the objectives that clip a ratio."""

import torch

from algorithms.metrics import Metrics, masked_mean
from algorithms.tokens import Tokens


def clipped_surrogate(
    ratio_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t). Shapes [T].

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; two bounds: DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 10. Reports `clip_fraction`: trained tokens whose gradient the clip took
    away, so A > 0 above or A < 0 below.
    """
    advantages_T = tokens.advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    is_clipped_T = ((ratio_T > 1 + clip_high) & (advantages_T > 0)) | ((ratio_T < 1 - clip_low) & (advantages_T < 0))
    return losses_T, masked_mean("clip_fraction", is_clipped_T, tokens.loss_mask_T)
