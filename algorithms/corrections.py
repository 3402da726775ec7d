"""Corrections weigh or mask tokens for lag and for the engine's rounding. `broker.staleness` bounds lag.

All have one signature, which your own (`package.module:function` in a recipe) shares:

    f(policy_logprobs_T, tokens, **options) -> (weights_T, metrics)

`tokens` is an `algorithms.tokens.Tokens`. The numerator is the learner's policy without gradient: the proximal
logprobs where the objective has a ratio to these, else the current ones, detached; a trust region looks at the current
ones in any case. The denominator is always the behavior policy. Weights multiply the objective's losses; 0 masks a
token.

Here: pi / mu itself, capped, normalized or masked, and a function of lag alone. `correction_masks`: 0 or 1 by token,
sequence, KL estimate, worst token, advantage, the batch's mean of (log r)^2.

The invariant: no two of WEIGHTS together, since each is the whole ratio and lag would count twice. Masks and age may
be combined with any of them and with each other.
"""

from collections.abc import Callable
from typing import Literal

import torch

from .correction_masks import geometric_sequence_mask, kl_rejection, m2po, opsm, token_mask, veto
from .metrics import Metrics, masked_mean
from .ratios import MAX_LOG_RATIO, geometric_sequence_ratio, log_difference, sequence_ratio, token_ratio
from .tokens import Tokens, segment_sum, spread


def truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = min(pi_prox(y_t) / mu(y_t), cap).

    Anchored to the behavior policy, token by token: it ignores that the tokens before were sampled by mu, too.

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    cap 2 is theirs.
    """
    return _truncated(_token_ratio(policy_logprobs_T, tokens), tokens, cap)


def sequence_truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_i = min(product of pi_prox(y_t) / mu(y_t) over the sequence, cap), at each of its tokens.

    Anchored to the behavior policy. Unbiased without the cap; its variance grows with the length of the sequence.

    Source: Liu et al. 2025, "When Speed Kills Stability" (richardli.xyz/rl-collapse); the product, as verl,
    SkyRL and TRL compute it. Cap 2 is verl's.
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

    Anchored to the behavior policy. Biased, but its variance does not grow with length.

    Source: AReaL, which calls it the sequence weight; the ratio is GSPO's (arXiv:2507.18071, equation 7). Cap 2 is
    that of the other two.
    """
    ratio_S = geometric_sequence_ratio(
        policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens
    )
    return _truncated(spread(ratio_S, tokens.cu_seqlens), tokens, cap)


def pair_truncated_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_p = min(product of pi(y_t) / mu(y_t) over both responses of the pair, cap), at each of their tokens.

    For losses of pairs alone: sequences 2p and 2p + 1 of the row are a pair. Anchored to the behavior policy. A loss of
    pairs is an expectation over pairs of the current policy, and this corrects for pairs of older weights; the cap
    biases it, and the variance grows with the length of both responses.

    Source: importance sampling of the pair as one action, truncated as in Ionides 2008. Asynchronous online DPO,
    Noukhovitch et al. 2024 (arXiv:2410.18252), uses no weight. Cap 2 is that of the others.
    """
    difference_T = log_difference(policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T)
    sums_S = segment_sum(difference_T, tokens.cu_seqlens)
    ratio_P = (sums_S[0::2] + sums_S[1::2]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _truncated(spread(ratio_P.repeat_interleave(2), tokens.cu_seqlens), tokens, cap)


def self_normalized_is(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
    mean_weight: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = min(pi_prox(y_t) / mu(y_t), cap) / mean_weight, so that the weights of an update have mean 1.

    Anchored to the behavior policy. `mean_weight` is the mean of the capped weights over the trained tokens of
    the whole update, all micro-batches and ranks: one micro-batch cannot know it, so the caller supplies it.
    It is the metric `capped_weight` of a first pass (its sums added up, then divided); at 1 this is
    `truncated_is`.

    Source: weighted importance sampling, Precup, Sutton and Singh 2000; truncated first, then normalized, like
    verl's rollout_is_batch_normalize, whose cap is 2 too and whose mean is that of the step's whole batch.
    """
    weights_T, metrics = _truncated(_token_ratio(policy_logprobs_T, tokens), tokens, cap)
    return weights_T / mean_weight, {**metrics, **masked_mean("capped_weight", weights_T, tokens.loss_mask_T)}


def icepop(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = r_t if low <= r_t <= high else 0, r_t = pi_prox(y_t) / mu(y_t).

    Anchored to the behavior policy: weighs like `decoupled` within the bounds and masks outside, where
    truncation would still learn from the token. `token_mask` masks without weighing.

    Source: IcePop, Ring-1T (arXiv:2510.18855); 0.5 and 5 are the defaults of verl's IcePop preset.
    """
    ratio_T = _token_ratio(policy_logprobs_T, tokens).detach()
    is_kept_T = (ratio_T >= low) & (ratio_T <= high)
    weights_T = torch.where(is_kept_T, ratio_T, torch.zeros_like(ratio_T))
    return weights_T, masked_mean("icepop_masked_fraction", ~is_kept_T, tokens.loss_mask_T)


def decoupled(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = pi_prox(y_t) / mu(y_t), beside a clip that is anchored to the proximal policy.

    The weight is anchored to the behavior policy and has no cap but the numerical one of `algorithms.ratios`.

    Source: decoupled PPO, Hilton et al. 2022 (arXiv:2110.00641), equation 2; AReaL, Fu et al. 2025
    (arXiv:2505.24298), equation 5.
    """
    return _truncated(_token_ratio(policy_logprobs_T, tokens), tokens, float("inf"))


def _token_ratio(policy_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return token_ratio(policy_logprobs_T, tokens.behavior_logprobs_T, tokens.loss_mask_T)


def _truncated(ratio_T: torch.Tensor, tokens: Tokens, cap: float) -> tuple[torch.Tensor, Metrics]:
    weights_T = ratio_T.detach().clamp(max=cap)
    return weights_T, masked_mean("capped_fraction", ratio_T > cap, tokens.loss_mask_T)


def age_weight(
    policy_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    kind: Literal["power", "exponential", "linear"] = "power",
    rate: float = 0.5,
    zero_above_lag: int | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """w_t = f(lag_t): power (1 + lag)^-rate, exponential exp(-rate lag), linear max(0, 1 - rate lag).

    The weight depends on versions alone, not on logprobs. In all three kinds f(0) = 1 and the slope there is -rate;
    power falls slowest (0.5 at lag 3 for rate 0.5), linear is 0 from lag 1 / rate on. Above
    `zero_above_lag` every kind is 0; None sets no such limit.
    It shrinks the step on stale tokens beside any other correction and replaces none: ratios correct a bias, this
    weight only reduces the tokens' influence. The sum of the weights is not restored.

    Source: none for language models; verl, TRL, slime, AReaL, prime-rl and SkyRL bound or measure lag but have no
    loss weight by age that we know of. The power form at 0.5 is FedAsync's in federated learning (Xie et al.
    2019, arXiv:1903.03934); TorchRL samples replay with 1 / (1 + lag). Treat it as an experiment.
    """
    lags_T = tokens.lags_T.to(torch.promote_types(policy_logprobs_T.dtype, tokens.loss_mask_T.dtype))
    weights_T = _DECAYS[kind](lags_T, rate)
    if zero_above_lag is not None:
        weights_T = torch.where(tokens.lags_T > zero_above_lag, torch.zeros_like(weights_T), weights_T)
    weights_T = torch.where(tokens.loss_mask_T > 0, weights_T, torch.ones_like(weights_T))
    return weights_T, {
        **masked_mean("age_weight", weights_T, tokens.loss_mask_T),
        **masked_mean("age_masked_fraction", weights_T == 0, tokens.loss_mask_T),
    }


def _power(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return (1 + lags_T) ** -rate


def _exponential(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.exp(-rate * lags_T)


def _linear(lags_T: torch.Tensor, rate: float) -> torch.Tensor:
    return (1 - rate * lags_T).clamp(min=0)


_DECAYS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "power": _power,
    "exponential": _exponential,
    "linear": _linear,
}


CORRECTIONS: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "truncated_is": truncated_is,
    "sequence_truncated_is": sequence_truncated_is,
    "geometric_truncated_is": geometric_truncated_is,
    "self_normalized_is": self_normalized_is,
    "icepop": icepop,
    "decoupled": decoupled,
    "token_mask": token_mask,
    "geometric_sequence_mask": geometric_sequence_mask,
    "kl_rejection": kl_rejection,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
    "age_weight": age_weight,
}
PAIR_CORRECTIONS: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {"pair_truncated_is": pair_truncated_is}
"""The corrections of losses of pairs. Each is policy / behavior of the whole pair, at all tokens of both responses."""

WEIGHTS = frozenset(
    {
        "truncated_is",
        "sequence_truncated_is",
        "geometric_truncated_is",
        "self_normalized_is",
        "icepop",
        "decoupled",
    }
)
"""Corrections that multiply by policy / behavior."""
TRUST_REGIONS = frozenset({"m2po"})
"""Corrections that bound the distance of the current policy from the behavior policy. They do not use the proximal
policy: it does not move with the updates of a step, so it would bound the first update alone."""
