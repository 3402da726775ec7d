"""ASPO: good tokens have the inverse ratio, so that those to which the policy gives less than the anchor weigh most."""

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.ratios import token_log_ratio
from headway.algorithms.tokens import Tokens

from .clipping import is_beyond, weighted_log_likelihood


def aspo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(m_t min(w_t, dual_clip)) A_t log pi(y_t), w_t = 1 / r_t for A_t > 0, else r_t;
    m_t = 0 for A_t > 0 and r_t > 1 + clip_high, or A_t < 0 and r_t < 1 - clip_low, else 1; r_t = pi(y_t) / anchor(y_t).

    sg stops the gradient. The mask is PPO's clip; the flipped weight is not an importance weight and corrects no lag.
    Anchor: pi_old in the paper. The dual clip is soft: it limits the weight, the gradient stays. The gradient is the
    paper's; the value is that of the weighted log-likelihood that the paper shows to be equivalent. `clip_fraction`:
    trained tokens masked or at the dual clip.

    Source: ASPO, Wang et al. 2025 (arXiv:2510.06062), section 6 and equation 3 of version 2; the form of the loss is
    its proposition 4.1. 0.2 is of its appendix B. It names no number for the dual clip: 3 is that of its figure 4 and
    of Ye et al. 2020 (arXiv:1912.09729). The paper says soft of A > 0; here A < 0 is alike.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    ratio_T = log_ratio_T.exp()
    flipped_T = torch.where(tokens.advantages_T > 0, -log_ratio_T, log_ratio_T).exp()
    is_masked_T = is_beyond(ratio_T, tokens.advantages_T, low=1 - clip_low, high=1 + clip_high)
    weights_T = torch.where(is_masked_T, torch.zeros_like(ratio_T), flipped_T.clamp(max=dual_clip))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_masked_T | (flipped_T > dual_clip), tokens)
