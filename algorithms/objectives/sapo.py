"""SAPO: a smooth gate in the place of PPO's clip."""

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens


def sapo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, r_t = pi(y_t) / anchor(y_t);
    tau = tau_positive for A_t > 0, else tau_negative.

    The gradient is that of -r_t A_t times 4 p (1 - p), p = sigmoid(tau (r_t - 1)): 1 at r_t = 1, fading on both
    sides, the faster the larger tau; so it fades also where PPO's clip would not act. Anchor: pi_old in the paper,
    the policy that sampled; both anchors are possible. Nothing is clipped; `gate` is the mean of that factor over
    trained tokens. The paper averages over each response's tokens, then over responses (`sequence_mean`).

    Source: SAPO, Gao et al. 2025 (arXiv:2511.20347), tau 1 and 1.05 as there and in Trinity and ms-swift.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    advantages_T = tokens.trained_advantages
    tau_T = torch.full_like(ratio_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    losses_T = -4 / tau_T * gate_T * advantages_T
    return losses_T, masked_mean("gate", 4 * gate_T * (1 - gate_T), tokens.loss_mask_T)
