"""TOPR: good samples have weight 1, bad ones the ratio of their whole sequence, at most a cap."""

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.ratios import sequence_ratio
from headway.algorithms.segments import spread
from headway.algorithms.tokens import Tokens

from .clipping import weighted_log_likelihood


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
