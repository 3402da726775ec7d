"""The surrogate that PPO clips, without the clip."""

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens


def unclipped(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -r_t A_t, r_t = pi(y_t) / anchor(y_t).

    The importance-weighted policy gradient. It does not bound the ratio; combine it with a mask that does (`m2po`).
    Anchored to the behavior policy it includes the importance weight.

    Source: conservative policy iteration, Kakade and Langford 2002; PPO, Schulman et al. 2017 (arXiv:1707.06347),
    equation 6.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    return -ratio_T * tokens.trained_advantages, {}
