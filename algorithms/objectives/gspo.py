"""GSPO: the clip on the length-normalized ratio of the whole sequence."""

import torch

from algorithms.metrics import Metrics
from algorithms.ratios import gspo_token_ratio
from algorithms.tokens import Tokens

from .clipping import clipped_surrogate


def gspo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Metrics]:
    """loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i), s_i the geometric mean of the token
    ratios.

    Given at every token in the form of equation 14, so that `sequence_mean` aggregation yields exactly
    equation 5 and its gradient; `token_mean` weights sequences by their length. Source: GSPO, Zheng et al.
    2025 (arXiv:2507.18071); bounds of section 5.1. Anchor: pi_old there, the policy that sampled; both
    anchors are possible here.
    """
    ratio_T = gspo_token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high)
