"""Importance ratios between two policies that gave the same tokens logprobs, and estimates of their divergence.

Token ratio       r_t = pi(y_t) / anchor(y_t)
Sequence ratio    product of r_t over the trained tokens of a sequence: the exact weight of the whole sequence
Geometric mean    that product to the power 1 / |y|: GSPO's s_i. Systems call either of the two "sequence"
                  ratio; here each has its own name.

Logarithms of ratios are clamped to +-20 before they are exponentiated (as verl does), so that nothing
overflows; there the gradient is 0. Tokens with mask 0 have ratio 1 and no gradient, whatever their logprobs.

`KL_ESTIMATORS` are Schulman's estimators of KL(pi || reference) on samples of pi, per token [T]; x = log pi(y_t) - log
reference(y_t). They are unbiased only on samples of pi; on stale samples they stay penalties that vanish where the
policies agree (k1 excepted). As a loss they carry pi's gradient; in a reward they are numbers, so detach them. Exchange
the first two arguments for the other direction. Tokens with mask 0 give 0.
"""

from collections.abc import Callable

import torch

from .tokens import segment_mean, segment_sum, spread

MAX_LOG_RATIO = 20.0


def log_difference(
    logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor
) -> torch.Tensor:
    """[T] log pi(y_t) - log anchor(y_t); 0 where the mask is 0. Not clamped."""
    difference_T = logprobs_T - anchor_logprobs_T
    return torch.where(loss_mask_T > 0, difference_T, torch.zeros_like(difference_T))


def token_log_ratio(
    logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor
) -> torch.Tensor:
    """[T] log r_t, clamped."""
    return _clamped(log_difference(logprobs_T, anchor_logprobs_T, loss_mask_T))


def token_ratio(logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """[T] r_t = pi(y_t) / anchor(y_t). Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 6."""
    return token_log_ratio(logprobs_T, anchor_logprobs_T, loss_mask_T).exp()


def sequence_ratio(
    logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """[S] product of r_t: pi(y) / anchor(y). 1 for a sequence without trained tokens."""
    return _clamped(segment_sum(log_difference(logprobs_T, anchor_logprobs_T, loss_mask_T), cu_seqlens)).exp()


def geometric_sequence_ratio(
    logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """[S] s_i = (pi(y) / anchor(y)) ** (1 / |y|), |y| the trained tokens.

    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equation 7.
    """
    difference_T = log_difference(logprobs_T, anchor_logprobs_T, loss_mask_T)
    return _clamped(segment_mean(difference_T, loss_mask_T, cu_seqlens)).exp()


def gspo_token_ratio(
    logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """[T] s_i,t = sg[s_i] * pi(y_t) / sg[pi(y_t)]: the value of s_i, the gradient of the token's own logprob.

    Averaged over a sequence's tokens its gradient is that of s_i itself, so token losses can carry a sequence
    objective. sg stops the gradient. Tokens with mask 0 have the value and no gradient.
    Source: GSPO, equation 14 (GSPO-token).
    """
    with torch.no_grad():
        log_ratio_S = segment_mean(log_difference(logprobs_T, anchor_logprobs_T, loss_mask_T), loss_mask_T, cu_seqlens)
        carries_gradient_T = spread(log_ratio_S.abs() <= MAX_LOG_RATIO, cu_seqlens) & (loss_mask_T > 0)
    one_T = torch.where(carries_gradient_T, logprobs_T, torch.zeros_like(logprobs_T))
    return (one_T - one_T.detach()).exp() * spread(_clamped(log_ratio_S).exp(), cu_seqlens)


def _clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """k1_t = x_t, x_t = log pi(y_t) - log reference(y_t).

    Unbiased, of either sign, varies much. As an on-policy loss its expected gradient is 0: use it in the reward.

    Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    return token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T)


def k2(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """k2_t = x_t^2 / 2, x_t = log pi(y_t) - log reference(y_t).

    Biased as a value; as an on-policy loss its expected gradient is that of the KL.

    Source: as k1.
    """
    return token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T) ** 2 / 2


def k3(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """k3_t = exp(-x_t) - 1 + x_t, x_t = log pi(y_t) - log reference(y_t).

    Unbiased and never negative; the penalty of GRPO's loss.

    Source: as k1; GRPO (arXiv:2402.03300), equation 4.
    """
    difference_T = token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T)
    return torch.expm1(-difference_T) + difference_T


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
