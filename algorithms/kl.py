"""Schulman's estimators of KL(pi || reference) on samples of pi, per token [T]; x = log pi(y_t) - log
reference(y_t).

Unbiased only on samples of pi; on stale samples they stay penalties that vanish where the policies agree (k1
excepted). As a loss they carry pi's gradient; in a reward they are numbers, so detach them. Exchange the first two
arguments for the other direction. Tokens with mask 0 give 0; x is clamped as in `algorithms.ratios`.
"""

from collections.abc import Callable

import torch

from .ratios import token_log_ratio


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


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
