"""GSPO: the clip on the length-normalized ratio of the whole sequence, with one advantage or one per token."""

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.ratios import gspo_token_ratio
from headway.algorithms.segments import segment_mean, spread
from headway.algorithms.tokens import Tokens

from .clipping import clipped_surrogate


def gspo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Metrics]:
    """loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i), s_i = (pi(y_i) / anchor(y_i)) ** (1 / |y_i|).

    A sequence is clipped as a whole. Every token has the loss in the form of equation 14, so that `sequence_mean`
    aggregation yields exactly equation 5 and its gradient; `token_mean` weights sequences by their length. A_i is
    the mean of the advantages of the sequence's trained tokens: the advantage itself where all share one;
    `gspo_token` keeps them apart. Anchor: pi_old in the paper, the policy that sampled; both anchors are possible.

    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 5 and 7; bounds of section 5.1.
    """
    advantages_S = segment_mean(tokens.advantages_T, tokens.loss_mask_T, tokens.cu_seqlens)
    of_sequence = tokens._replace(advantages_T=spread(advantages_S, tokens.cu_seqlens))
    return gspo_token(current_logprobs_T, anchor_logprobs_T, of_sequence, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t), s_t = sg(s_i) pi(y_t) / sg(pi(y_t)),
    s_i = (pi(y_i) / anchor(y_i)) ** (1 / |y_i|).

    GSPO for advantages that differ within a sequence (per turn, per token): the ratio's value is the sequence's,
    the advantage and the gradient are the token's, so tokens of one sequence with advantages of opposite signs may
    be clipped differently. Where the advantages of a sequence are equal it is `gspo`. Anchor as there.

    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 13 and 14; bounds of section 5.1.
    """
    ratio_T = gspo_token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high)
