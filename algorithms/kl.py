"""Schulman's estimators of KL(pi || reference) on samples of pi, per token [T]; x = log pi(y_t) - log
reference(y_t).

Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). Unbiased only on
samples of pi; on stale samples they stay penalties that vanish where the policies agree (k1 excepted). Tokens
with mask 0 give 0; x is clamped as in `algorithms.ratios`.
"""

import torch

from .ratios import token_log_ratio


def k1(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """x. Unbiased, of either sign, varies much. As an on-policy loss its expected gradient is 0."""
    return token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T)


def k2(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """x^2 / 2. Biased as a value; as an on-policy loss its expected gradient is that of the KL."""
    return token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T) ** 2 / 2


def k3(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """exp(-x) - 1 + x. Unbiased, never negative; GRPO's (arXiv:2402.03300, equation 4)."""
    difference_T = token_log_ratio(logprobs_T, reference_logprobs_T, loss_mask_T)
    return torch.expm1(-difference_T) + difference_T
