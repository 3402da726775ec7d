"""DPPO: PPO's one-sided mask, bounded by the change of a probability in the place of its ratio."""

from typing import Literal

import torch

from headway.algorithms.metrics import Metrics, share
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens

from .clipping import weighted_log_likelihood


def dppo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    threshold: float = 0.15,
    cap: float = 20.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(m_t min(r_t, cap)) A_t log pi(y_t), r_t = pi(y_t) / anchor(y_t);
    m_t = 0 where D_t > threshold and the update moves further away (A_t > 0, r_t > 1 or A_t < 0, r_t < 1), else 1.

    sg stops the gradient. D_t compares "this token" with "any other" under both policies. With p = pi(y_t) and
    q = anchor(y_t): `tv` |p - q|, `kl` q log(q / p) + (1 - q) log((1 - q) / (1 - p)). So rare tokens may change
    their ratio much, and frequent ones little. Meant to be anchored to the behavior policy: the trust region is
    around the sampler. `clip_fraction`: trained tokens masked or at the cap.

    Source: DPPO, Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (arXiv:2602.04879),
    equations 11 to 14. 0.15 is for `tv`; with `kl` give 0.05 (both as TRL documents the paper's choice). The cap 20
    and the form of the loss are verl's; up to the cap the gradient is that of -m_t r_t A_t. prime-rl's default loss
    masks by p - q on the same side of A_t, beyond 0.2. The paper's top-k divergences need more than the sampled
    token's logprob and are not here.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    with torch.no_grad():
        is_far_T = _DIVERGENCES[divergence](current_logprobs_T, anchor_logprobs_T) > threshold
        is_outward_T = torch.where(ratio_T > 1, tokens.advantages_T > 0, (ratio_T < 1) & (tokens.advantages_T < 0))
        is_masked_T = is_far_T & is_outward_T
    weights_T = torch.where(is_masked_T, torch.zeros_like(ratio_T), ratio_T.clamp(max=cap))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_masked_T | (ratio_T > cap), tokens)


def _total_variation(logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor) -> torch.Tensor:
    return (_proper(logprobs_T).exp() - _proper(anchor_logprobs_T).exp()).abs()


def _kl(logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor) -> torch.Tensor:
    log_p_T, log_q_T = _proper(logprobs_T), _proper(anchor_logprobs_T)
    # log(1 - p) is computed as log(-expm1(log p)), which is exact where p is nearly 0 or 1.
    log_rest_p_T, log_rest_q_T = (-torch.expm1(log_p_T)).log(), (-torch.expm1(log_q_T)).log()
    return log_q_T.exp() * (log_q_T - log_p_T) + log_rest_q_T.exp() * (log_rest_q_T - log_rest_p_T)


def _proper(logprobs_T: torch.Tensor) -> torch.Tensor:
    """Returns logprobs in at least float32 and a little below 0, so that 1 - p has a logarithm."""
    return logprobs_T.to(torch.promote_types(logprobs_T.dtype, torch.float32)).clamp(max=-1e-7)


_DIVERGENCES = {"tv": _total_variation, "kl": _kl}
