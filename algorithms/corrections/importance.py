"""Importance weights pi_prox / mu: per token and per sequence, truncated or not."""

import torch

from algorithms.metrics import Metrics, masked_mean
from algorithms.ratios import geometric_sequence_ratio, sequence_ratio, token_ratio
from algorithms.segments import spread
from algorithms.tokens import Tokens


def truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = min(pi_prox(y_t) / mu(y_t), cap).

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    cap 2 is theirs.
    """
    return _truncated(token_ratio(policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T), tokens, cap)


def sequence_truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_i = min(product of pi_prox(y_t) / mu(y_t) over the sequence, cap), at each of its tokens.

    The product, as verl, SkyRL and TRL compute it: unbiased without the cap, and the more varied the longer
    the sequence.
    """
    ratio_S = sequence_ratio(policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    return _truncated(spread(ratio_S, tokens.cu_seqlens), tokens, cap)


def geometric_truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_i = min(geometric mean of pi_prox(y_t) / mu(y_t) over the sequence, cap), at each of its tokens.

    What AReaL calls the sequence weight. Biased, but its spread does not grow with length.
    """
    ratio_S = geometric_sequence_ratio(
        policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens
    )
    return _truncated(spread(ratio_S, tokens.cu_seqlens), tokens, cap)


def decoupled(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = pi_prox(y_t) / mu(y_t), beside a clip that is anchored to the proximal policy.

    Source: decoupled PPO, Hilton et al. 2022 (arXiv:2110.00641), equation 2; AReaL, Fu et al. 2025
    (arXiv:2505.24298), equation 5. No cap but the numerical one of `algorithms.ratios`.
    """
    return _truncated(
        token_ratio(policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T), tokens, float("inf")
    )


def _truncated(ratio_T: torch.Tensor, tokens: Tokens, cap: float) -> tuple[torch.Tensor, Metrics]:
    weights_T = ratio_T.detach().clamp(max=cap)
    return weights_T, masked_mean("capped_fraction", ratio_T > cap, tokens.loss_mask_T)
