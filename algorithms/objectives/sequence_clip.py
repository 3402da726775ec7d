"""PPO's clip on the ratio of the whole sequence, not normalized by its length."""

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.ratios import sequence_ratio
from headway.algorithms.segments import segment_mean, segment_sum, spread
from headway.algorithms.tokens import Tokens

from .clipping import clipped_surrogate


def sequence_clip(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(R_i A_i, clip(R_i, 1 - clip_low, 1 + clip_high) A_i) / |y_i|, R_i = pi(y_i) / anchor(y_i).

    R_i is the product of a sequence's token ratios, |y_i| its trained tokens. `sequence_sum` aggregation yields the
    mean of the sequences' surrogates and its gradient. A sequence is clipped as a whole, and the longer it is, the
    sooner: `gspo` takes the geometric mean. A_i is the mean of the advantages of the sequence's trained tokens.

    Source: the responses as single actions of RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), section 3, under PPO's
    clip, Schulman et al. 2017 (arXiv:1707.06347), equation 7; TRL's RLOO has this loss.
    """
    mask_T, cu_seqlens = tokens.loss_mask_T, tokens.cu_seqlens
    ratio_S = sequence_ratio(current_logprobs_T, anchor_logprobs_T, mask_T, cu_seqlens)
    advantages_S = segment_mean(tokens.advantages_T, mask_T, cu_seqlens)
    of_sequence = tokens._replace(advantages_T=spread(advantages_S, cu_seqlens))
    losses_T, metrics = clipped_surrogate(
        spread(ratio_S, cu_seqlens), of_sequence, clip_low=clip_low, clip_high=clip_high
    )
    lengths_S = segment_sum((mask_T > 0).to(losses_T.dtype), cu_seqlens).clamp(min=1)
    return losses_T / spread(lengths_S, cu_seqlens), metrics
