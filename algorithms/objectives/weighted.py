"""Objectives that weight the log-likelihood: plain policy gradient, CISPO, TOPR, ASPO. No bound takes a token's
gradient away, except ASPO's mask.
"""

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.ratios import sequence_ratio, token_log_ratio, token_ratio
from headway.algorithms.tokens import Tokens, spread

from .clipped import is_beyond, weighted_log_likelihood


def policy_gradient(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -A_t log pi(y_t).

    The anchor plays no part; off-policy it is biased without a correction.

    Source: REINFORCE, Williams 1992; Sutton et al. 2000.
    """
    return weighted_log_likelihood(torch.ones_like(current_logprobs_T), current_logprobs_T, tokens), {}


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


def topr(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(w_t) A_t log pi(y_t), w_t = 1 for A_t >= 0, else min(pi(y) / anchor(y), cap).

    sg stops the gradient; pi(y) / anchor(y) is the product of the token ratios over the trained tokens of the
    sequence, so a bad sample fades once the policy has left it, and the longer it is the faster. Meant to be anchored
    to the behavior policy, whatever its lag; no correction beside it. The paper's A is a reward, with or without a
    baseline. It sums over tokens: an aggregation that divides by each response's length is not the paper's.
    `clip_fraction`: trained tokens with A < 0 and a ratio above the cap.

    Source: TOPR, Le Roux et al. 2025 (arXiv:2503.14286), with its choice of bounds: positives not corrected, the ratio
    of negatives truncated to [0, 1].
    """
    ratio_S = sequence_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    ratio_T = spread(ratio_S, tokens.cu_seqlens)
    is_bad_T = tokens.advantages_T < 0
    weights_T = torch.where(is_bad_T, ratio_T.clamp(max=cap), torch.ones_like(ratio_T))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_bad_T & (ratio_T > cap), tokens)


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
