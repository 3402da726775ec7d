"""PPO's clip on the token ratio, with separate bounds and the dual clip."""

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens

from .clipping import clipped_surrogate


def ppo_clip(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = pi(y_t) / anchor(y_t);
    with dual_clip > 0, for A_t < 0 at most -dual_clip A_t.

    Anchored to the behavior policy it is a trust region around the sampler, which includes the importance weight;
    anchored to the proximal policy it limits one batch's updates and says nothing of lag. A token beyond its bound
    has no gradient. The dual clip bounds what a token with A < 0 and a large ratio can cost; without it that loss
    grows with the ratio.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7, with GRPO's sequence advantage
    (arXiv:2402.03300, equation 3). 0.2 is PPO's; DAPO (arXiv:2503.14476) takes clip_high 0.28. Dual clip: Ye et al.
    2020 (arXiv:1912.09729), equation 5, who take 3; verl has it on by default (clip_ratio_c 3), here it is off, as
    in PPO.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
