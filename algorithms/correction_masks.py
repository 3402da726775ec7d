"""Masks (weights of 0 or 1) leave out tokens on which pi has drifted too far from mu. Any number may be combined.

All compare the learner's policy pi (the proximal logprobs, or the current ones) with the behavior policy mu that
sampled, r_t = pi(y_t) / mu(y_t). Aggregation still divides by the tokens and sequences before masking, as the published
masks do, so a masked token is a loss of 0; verl removes rejected tokens from the response mask, and divides by the
remaining ones. Estimates of KL(mu || pi) clamp each token's log r_t to +-20.

M2PO's mask and `self_normalized_is` need statistics of the whole batch (`BATCH_STATISTICS`), which are sums that add up
over micro-batches and ranks:

    sums(policy_logprobs_T, tokens, **options) of all micro-batches, added up ─ settle(sums, **options) ─► an option

So an update's batch gives the same weights however it is cut into micro-batches. The logprobs are those that the
correction itself uses: of the current policy, before the update, or of the proximal one.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.ratios import KL_ESTIMATORS, geometric_sequence_ratio, k1, token_log_ratio, token_ratio
from headway.algorithms.tokens import Tokens, segment_mean, segment_sum, sequence_of_token, spread


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
    estimates_T = KL_ESTIMATORS[kind](tokens.behavior_logprobs_T, policy_logprobs_T.detach(), tokens.loss_mask_T)
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
    drift_T = k1(tokens.behavior_logprobs_T, policy_logprobs_T.detach(), tokens.loss_mask_T)
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


def m2po(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    budget: float = 0.04,
    limit: float = -1.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = 0 if t is outward and |log r_t| > limit, else 1; r_t = pi(y_t) / mu(y_t), and the limit is the largest that
    keeps the mean of (log r_u)^2 over the outward u with |log r_u| <= limit within the budget.

    Anchored to the behavior policy; meant for an objective that does not clip. Outward are the tokens where
    PPO's clip could act: A > 0 and r > 1, or A < 0 and r < 1. Only they may be masked, the largest first. pi is the
    current policy, also beside an objective that is anchored to the proximal one, so every update of a step is held.

    The budget holds for the whole batch. With `limit` below 0 this function computes the limit of this micro-batch
    alone, which is the same only if the batch is one micro-batch; otherwise it may mask more tokens than the batch's
    mean requires. In a recipe the learner passes the limit of all tokens of an update, which it computes by a forward
    pass before the update, to 0.2% (`BATCH_STATISTICS`); `m2po_threshold` is exact.

    Source: Zheng et al. 2025, "Prosperity before Collapse" (arXiv:2510.01161), algorithm 1; 0.04 is theirs.
    AReaL masks any trained token, whatever its advantage, by the proximal policy; the outward ones and the current
    policy are the paper's. Tokens with equal |log r| are masked together.
    """
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    is_outward_T = is_outward(log_ratio_T, tokens.loss_mask_T, tokens.advantages_T)
    largest = _threshold(log_ratio_T, is_outward_T, budget) if limit < 0 else limit
    weights_T, metrics = as_weights("m2po_masked_fraction", is_outward_T & (log_ratio_T.abs() > largest), tokens)
    before = masked_mean("m2po_second_moment", log_ratio_T**2, is_outward_T.to(tokens.loss_mask_T.dtype))
    return weights_T, {**metrics, **before}


def m2po_threshold(
    log_ratio_T: torch.Tensor, mask_T: torch.Tensor, advantages_T: torch.Tensor, *, budget: float = 0.04
) -> float:
    """limit = the largest |log r_t| for which mean((log r_u)^2 over outward u with |log r_u| <= |log r_t|) <= budget,
    or 0.

    The value for `limit` of `m2po` over a whole batch: pass `algorithms.ratios.token_log_ratio`, the loss mask and the
    advantages of all micro-batches and ranks, concatenated. O(T log T), waits for the device.

    Source: as `m2po`.
    """
    return float(_threshold(log_ratio_T, is_outward(log_ratio_T, mask_T, advantages_T), budget))


def is_outward(log_ratio_T: torch.Tensor, mask_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """A_t > 0 and log r_t > 0, or A_t < 0 and log r_t < 0, of trained tokens: [T] bool. PPO's clip acts nowhere else.

    Source: as `m2po`.
    """
    is_further_T = ((advantages_T > 0) & (log_ratio_T > 0)) | ((advantages_T < 0) & (log_ratio_T < 0))
    return is_further_T & (mask_T > 0)


def _threshold(log_ratio_T: torch.Tensor, is_outward_T: torch.Tensor, budget: float) -> torch.Tensor:
    """Scalar. The mean of the first n sorted squares never falls with n, so the last mean within the budget counts."""
    infinite = log_ratio_T.new_full((1,), torch.inf)
    sizes_T = torch.where(is_outward_T, log_ratio_T.abs(), infinite).sort().values
    counts_T = torch.arange(1, sizes_T.numel() + 1, device=sizes_T.device)
    fits_T = (sizes_T.double() ** 2).cumsum(0) / counts_T <= budget
    is_last_of_equals_T = sizes_T < torch.cat([sizes_T[1:], infinite[: sizes_T.numel()]])
    kept_T = torch.where(fits_T & is_last_of_equals_T, sizes_T, torch.zeros_like(sizes_T))
    return torch.cat([kept_T, log_ratio_T.new_zeros(1)]).max()


_SMALLEST, _LARGEST, _BINS = 1e-5, 20.0, 1 << 13
"""The range of |log r| and the number of its bins, each 0.2% wide."""


class BatchStatistic(NamedTuple):
    """The two functions of a correction: its sums over tokens, and the option that is computed from them."""

    sums: Callable[..., torch.Tensor]
    """(policy_logprobs_T, tokens, **options) -> [n] float64 sums, which are added over micro-batches and ranks."""
    settle: Callable[..., dict[str, float]]


def _weight_sums(policy_logprobs_T: torch.Tensor, tokens: Tokens, *, cap: float = 2.0) -> torch.Tensor:
    weights_T = token_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T).clamp(max=cap)
    return torch.stack([(weights_T * tokens.loss_mask_T).double().sum(), tokens.loss_mask_T.double().sum()])


def _mean_weight(sums: torch.Tensor, **_: Any) -> dict[str, float]:
    total, count = sums.tolist()
    return {"mean_weight": total / count if total else 1.0}


def _second_moments(policy_logprobs_T: torch.Tensor, tokens: Tokens, **_: Any) -> torch.Tensor:
    """Returns the count of outward tokens and the sum of their (log r)^2, by bins of |log r|."""
    log_ratio_T = token_log_ratio(policy_logprobs_T.detach(), tokens.behavior_logprobs_T, tokens.loss_mask_T)
    outward = log_ratio_T[is_outward(log_ratio_T, tokens.loss_mask_T, tokens.advantages_T)].double().abs().cpu()
    bins = torch.bucketize(outward, _edges()).clamp(max=_BINS - 1)
    counts = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, torch.ones_like(outward))
    squares = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, outward**2)
    return torch.cat([counts, squares])


def _limit(sums: torch.Tensor, *, budget: float = 0.04, **_: Any) -> dict[str, float]:
    """Returns the upper edge of the last bin up to which the mean square is within the budget; 0 if there is none."""
    counts, squares = sums.cpu().view(2, _BINS).cumsum(1)
    fits = (squares <= budget * counts).nonzero().flatten()
    return {"limit": float(_edges()[int(fits[-1])]) if fits.numel() else 0.0}


def _edges() -> torch.Tensor:
    """[BINS] the largest |log r| of each bin."""
    return torch.logspace(math.log10(_SMALLEST), math.log10(_LARGEST), _BINS, dtype=torch.float64)


BATCH_STATISTICS = {
    "self_normalized_is": BatchStatistic(_weight_sums, _mean_weight),
    "m2po": BatchStatistic(_second_moments, _limit),
}
"""Batch statistics by the name of the correction."""
