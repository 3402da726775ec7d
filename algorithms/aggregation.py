"""Aggregations turn token losses into the batch's loss by shares_T: loss = sum_t(shares_t * losses_t).

The denominators count the whole batch, over all micro-batches and ranks. The sum over one micro-batch is its part of
the loss, and all parts add up to the loss, however the batch was cut. All functions of `AGGREGATIONS` return [T] and
have one signature; losses of pairs, which have no loss of a token, take `pair_mean`:

    f(loss_mask_T, cu_seqlens, *, tokens, sequences, **options) -> shares_T

DAPO is `token_mean`, GRPO and GSPO `sequence_mean`, RLOO and TOPR `sequence_sum`, Dr. GRPO `fixed_denominator`.
"""

from collections.abc import Callable

import torch

from .tokens import segment_sum, spread


def token_mean(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor, *, tokens: float, sequences: float) -> torch.Tensor:
    """share_t = m_t / tokens.

    `tokens`: trained tokens of the whole batch. Every token counts alike, long responses more.

    Source: DAPO (arXiv:2503.14476), equation 8.
    """
    return loss_mask_T / max(tokens, 1.0)


def sequence_mean(
    loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor, *, tokens: float, sequences: float
) -> torch.Tensor:
    """share_t = m_t / (|y_i| * sequences), |y_i| the trained tokens of t's sequence.

    `sequences`: those of the whole batch that have a trained token. Every response counts alike, the tokens
    of long ones less.

    Source: GRPO (arXiv:2402.03300), equation 3; GSPO (arXiv:2507.18071), equation 5.
    """
    lengths_S = segment_sum(loss_mask_T, cu_seqlens).clamp(min=1)
    return loss_mask_T / (spread(lengths_S, cu_seqlens) * max(sequences, 1.0))


def sequence_sum(
    loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor, *, tokens: float, sequences: float
) -> torch.Tensor:
    """share_t = m_t / sequences.

    `sequences`: those of the whole batch that have a trained token. A response is one action, whose logprob is the sum
    of its tokens', so long responses count more. The loss grows with length; Adam cancels a constant factor, the clip
    on the gradient's norm does not.

    Source: REINFORCE, Williams 1992, with the response as the action: RLOO (arXiv:2402.14740), TOPR (arXiv:2503.14286).
    verl calls it seq-mean-token-sum.
    """
    return loss_mask_T / max(sequences, 1.0)


def fixed_denominator(
    loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor, *, tokens: float, sequences: float, length: int
) -> torch.Tensor:
    """share_t = m_t / (sequences * length).

    `sequences`: those of the whole batch that have a trained token; `length`: a constant, in general the most
    tokens that may be generated. Every token counts alike as in `token_mean`, and the size of the step does not
    depend on how long the batch's responses happen to be.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783); TRL's loss_type dr_grpo divides by all sequences times
    max_completion_length. No default: the constant is the recipe's.
    """
    return loss_mask_T / (max(sequences, 1.0) * length)


def pair_mean(losses_P: torch.Tensor, weights_P: torch.Tensor, *, pairs: float) -> torch.Tensor:
    """loss = sum_p(w_p * loss_p) / pairs.

    `pairs`: those of the whole batch. For losses of pairs alone, which have one loss for both responses.

    Source: DPO, Rafailov et al. 2023 (arXiv:2305.18290), equation 7.
    """
    return (losses_P * weights_P).sum() / max(pairs, 1.0)


def trained_sequences(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Scalar: the number of sequences with at least one trained token, which a micro-batch adds to `sequences`."""
    return (segment_sum(loss_mask_T, cu_seqlens) > 0).sum()


AGGREGATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_denominator": fixed_denominator,
}
