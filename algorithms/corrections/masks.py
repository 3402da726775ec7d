"""Masks (weights of 0 or 1) leave out tokens on which pi has drifted too far from mu. Any number may be combined.

All compare the learner's policy pi (the proximal logprobs, or the current ones) with the behavior policy mu that
sampled, r_t = pi(y_t) / mu(y_t). Aggregation still divides by the tokens and sequences before masking, as the published
masks do, so a masked token is a loss of 0; verl removes rejected tokens from the response mask, and divides by the
remaining ones. Estimates of KL(mu || pi) clamp each token's log r_t to +-20.
"""

import math
from typing import Literal

import torch

from headway.algorithms import kl
from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.ratios import geometric_sequence_ratio, token_log_ratio, token_ratio
from headway.algorithms.segments import segment_mean, segment_sum, sequence_of_token, spread
from headway.algorithms.tokens import Tokens


def token_mask(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    low: float = 0.125,
    high: float = 8.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = 1 if low <= r_t <= high else 0, r_t = pi(y_t) / mu(y_t).

    Anchored to the behavior policy; `icepop` without its weight.

    Source: prime-rl's token mask; 0.125 and 8 were its defaults as long as it masked by ratio.
    """
    ratio_T = token_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    return as_weights("token_masked_fraction", (ratio_T < low) | (ratio_T > high), tokens)


def geometric_sequence_mask(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    low: float = 0.99,
    high: float = 1.01,
) -> tuple[torch.Tensor, Metrics]:
    """w_i = 1 if low <= s_i <= high else 0, s_i the geometric mean of r_t = pi(y_t) / mu(y_t) over the sequence.

    Anchored to the behavior policy. Unlike the product, s_i does not leave the bounds only because a response is
    long; a single bad token among many goes unseen (see `veto`).

    Source: Liu et al. 2025, "When Speed Kills Stability", part 3 (richardli.xyz/rl-collapse-3). Defaults are
    SkyRL's, also of its fully asynchronous recipe; verl's presets take 0.999 and 1.001, for rounding alone, and
    prime-rl took 0.1 and 10, which hardly ever acts.
    """
    ratio_S = geometric_sequence_ratio(
        policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens
    )
    is_masked_S = (ratio_S < low) | (ratio_S > high)
    return as_weights("geometric_masked_fraction", spread(is_masked_S, tokens.cu_seqlens), tokens)


def kl_rejection(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"] = "sequence_mean",
    threshold: float = 0.01,
) -> tuple[torch.Tensor, Metrics]:
    """w = 1 if |K| <= threshold else 0; K of k_t: k1 = -log r_t, k2 = (log r_t)^2 / 2, k3 = r_t - 1 - log r_t.

    Anchored to the behavior policy: k_t estimates KL(mu || pi), r_t = pi(y_t) / mu(y_t). `level` selects K and the
    tokens that it masks: `token` (k_t, the token), `sequence_mean`, `sequence_sum` or `sequence_max` (the mean, sum
    or largest |k_t| over the trained tokens, the whole sequence). The threshold is in nats: for k1 of
    sequence_mean, log 1.01 is the mask on the geometric mean from 1 / 1.01 to 1.01.

    Source: verl's rollout_rs (token_k1, seq_mean_k3, ...); defaults are its preset decoupled_k3_rs. verl gives
    k1 a lower and an upper bound, as ratios mu / pi: its "0.5_3.0" keeps r from 1 / 3 to 2. It has no seq_max_k1.
    """
    estimates_T = kl.ESTIMATORS[kind](tokens.behavior_logprobs_T, policy_logprobs_T.detach(), tokens.loss_mask_T)
    is_masked_T = _LEVELS[level](estimates_T, tokens).abs() > threshold
    return as_weights("kl_masked_fraction", is_masked_T, tokens)


def veto(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    threshold: float = 1e-4,
) -> tuple[torch.Tensor, Metrics]:
    """w_i = 1 if r_t >= threshold for all trained tokens of the sequence, else 0; r_t = pi(y_t) / mu(y_t).

    Anchored to the behavior policy. One token that the learner would hardly ever have sampled ("catastrophic")
    discards the whole response, since all that follows was conditioned on it.

    Source: verl's former rollout_token_veto_threshold, in Dr. Kernel (Liu et al. 2026, arXiv:2602.05885) at 1e-4.
    """
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    is_bad_T = (log_ratio_T < math.log(threshold)).to(tokens.loss_mask_T.dtype)
    is_masked_S = segment_sum(is_bad_T, tokens.cu_seqlens) > 0
    return as_weights("veto_masked_fraction", spread(is_masked_S, tokens.cu_seqlens), tokens)


def opsm(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    delta: float = 1e-4,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = 0 if A_t < 0 and mean_u log(mu(y_u) / pi(y_u)) > delta, the mean over t's sequence; else 1.

    Anchored to the behavior policy. A bad response that the learner already gives less often has little left to teach
    and disturbs most; good ones are kept, however stale. With one advantage for a whole response, whole sequences are
    masked.

    Source: off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556), section on scaling GRPO, which names no
    delta. 1e-4 is the default of slime and miles and masks nearly all bad responses that have become less
    likely; TRL suggests 0.5, which acts on extremes only.
    """
    drift_T = kl.k1(tokens.behavior_logprobs_T, policy_logprobs_T.detach(), tokens.loss_mask_T)
    drift_S = segment_mean(drift_T, tokens.loss_mask_T, tokens.cu_seqlens)
    is_masked_T = (tokens.advantages_T < 0) & spread(drift_S > delta, tokens.cu_seqlens)
    return as_weights("opsm_masked_fraction", is_masked_T, tokens)


def as_weights(name: str, is_masked_T: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
    """0 where masked, else 1; `name` reports the share of the trained tokens that is masked."""
    return (~is_masked_T).to(tokens.loss_mask_T.dtype), masked_mean(name, is_masked_T, tokens.loss_mask_T)


def _of_token(estimates_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return estimates_T


def _sequence_mean(estimates_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return spread(segment_mean(estimates_T, tokens.loss_mask_T, tokens.cu_seqlens), tokens.cu_seqlens)


def _sequence_sum(estimates_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return spread(segment_sum(estimates_T, tokens.cu_seqlens), tokens.cu_seqlens)


def _sequence_max(estimates_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    index_T = sequence_of_token(tokens.cu_seqlens)
    largest_S = estimates_T.new_zeros(tokens.cu_seqlens.numel() - 1)
    return largest_S.scatter_reduce(0, index_T, estimates_T.abs(), "amax")[index_T]


_LEVELS = {
    "token": _of_token,
    "sequence_mean": _sequence_mean,
    "sequence_sum": _sequence_sum,
    "sequence_max": _sequence_max,
}
