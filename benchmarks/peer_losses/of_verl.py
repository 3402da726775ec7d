"""The comparison with verl: its own functions, called as its trainer calls them."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

from headway.algorithms.ratios import KL_ESTIMATORS

from . import ours
from .ours import Setting, Side, composed, differentiated
from .sample import Outcome, Sample

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_denominator",
}
DUAL = {"dual_clip": 3.0}
"""Options of the dual clip, which verl's clip always has."""


def settings() -> Iterator[Setting]:
    """Yield all settings."""
    yield from losses()
    yield from corrected()
    yield from rejected()
    yield from estimated()


LOSSES: tuple[tuple[str, tuple[float, float, float], str, dict[str, Any]], ...] = (
    ("vanilla", (0.2, 0.2, 3.0), "ppo_clip", DUAL),
    ("vanilla", (0.2, 0.28, 1.3), "ppo_clip", {"dual_clip": 1.3, "clip_high": 0.28}),
    ("gspo", (3e-4, 4e-4, 3.0), "gspo", {}),
    ("gspo", (0.1, 0.05, 3.0), "gspo", {"clip_low": 0.1, "clip_high": 0.05}),
    ("cispo", (1.0, 4.0, 3.0), "cispo", {}),
    ("cispo", (0.2, 0.28, 3.0), "cispo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("dppo_tv", (0.15, 0.15, 20.0), "dppo", {}),
    ("dppo_tv", (0.03, 0.03, 1.2), "dppo", {"threshold": 0.03, "cap": 1.2}),
    ("dppo_kl", (0.05, 0.05, 20.0), "dppo", {"divergence": "kl", "threshold": 0.05}),
)
"""verl's loss and its bounds (low, high, cap); Headway's loss and its options."""


def losses() -> Iterator[Setting]:
    """Yield each policy loss under each aggregation; verl's SAPO has one of its own."""
    for (mode, (low, high, cap), objective, options), (theirs, mine) in product(LOSSES, AGGREGATIONS.items()):
        bounds = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": cap}
        name = f"{mode} {low:g} {high:g} {cap:g} {theirs}"
        yield name, composed(objective, options, aggregation=mine), policy_loss(mode, theirs, **bounds)
    for positive, negative in ((1.0, 1.05), (2.0, 5.0)):
        taus = {"tau_positive": positive, "tau_negative": negative}
        theirs_side = policy_loss("sapo", "seq-mean-token-mean", tau_pos=positive, tau_neg=negative)
        yield f"sapo {positive:g} {negative:g}", composed("sapo", taus, aggregation="sequence_mean"), theirs_side
    yield (
        "vanilla with k3 in the loss",
        composed("ppo_clip", DUAL, kl=0.1),
        policy_loss("vanilla", "token-mean", kl=0.1),
    )


CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token": ({"rollout_is": "token"}, {"kind": "truncated_is"}),
    "token 1.1": (
        {"rollout_is": "token", "rollout_is_threshold": 1.1},
        {"kind": "truncated_is", "options": {"cap": 1.1}},
    ),
    "sequence": ({"rollout_is": "sequence"}, {"kind": "sequence_truncated_is"}),
    "icepop": ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, {"kind": "icepop"}),
    "icepop 0.9 1.1": (
        {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"},
        {"kind": "icepop", "options": {"low": 0.9, "high": 1.1}},
    ),
    "normalized": ({"rollout_is": "token", "rollout_is_batch_normalize": True}, {"kind": "self_normalized_is"}),
}


def corrected() -> Iterator[Setting]:
    """Yield importance weights: of the proximal policy beside its clip, and of the current one (bypass)."""
    for name, (theirs, mine) in CORRECTIONS.items():
        clipped = composed("ppo_clip", DUAL, anchor="proximal", corrections=(mine,))
        yield f"decoupled {name}", clipped, policy_loss("vanilla", "token-mean", correction=theirs)
        for their_mode, our_mode in (("token-mean", "token_mean"), ("seq-mean-token-sum", "sequence_sum")):
            plain = composed("policy_gradient", corrections=(mine,), aggregation=our_mode)
            yield f"bypass {name} {their_mode}", plain, bypass(their_mode, loss_type="reinforce", **theirs)
    yield "bypass without weights", composed("policy_gradient"), bypass("token-mean", loss_type="reinforce")
    yield "bypass with PPO's clip", composed("ppo_clip", DUAL), bypass("token-mean", loss_type="ppo_clip")


LEVELS = {
    "token": ("token", 0.2, 0.02),
    "seq_mean": ("sequence_mean", 0.07, 0.05),
    "seq_sum": ("sequence_sum", 0.4, 0.3),
    "seq_max": ("sequence_max", 0.0, 0.2),
}
"""verl's name; Headway's, a threshold of k1 and one of k2 and k3 that some responses of the batch exceed."""


def rejected() -> Iterator[Setting]:
    """Yield masks by the proximal policy. The bounds of k1 are of mu / pi."""
    for (theirs, (level, of_k1, threshold)), kind in product(LEVELS.items(), ("k2", "k3")):
        kept = ours.kept("kl_rejection", kind=kind, level=level, threshold=threshold)
        yield f"rejection {theirs}_{kind}", kept, rejection(f"{theirs}_{kind}", threshold)
        if kind == "k2" and of_k1:  # verl has no seq_max_k1
            kept = ours.kept("kl_rejection", kind="k1", level=level, threshold=of_k1)
            bounds = f"{math.exp(-of_k1)}_{math.exp(of_k1)}"
            yield f"rejection {theirs}_k1", kept, rejection(f"{theirs}_k1", bounds)
    low, high = 0.95, 1.1
    inverted = f"{1 / high}_{1 / low}"
    for name, correction, option in (
        ("token ratio", "token_mask", "token_k1"),
        ("geometric mean", "geometric_sequence_mask", "seq_mean_k1"),
    ):
        yield f"rejection by {name}", ours.kept(correction, low=low, high=high), rejection(option, inverted)
    rule = {"kind": "kl_rejection", "options": {"kind": "k2", "level": "token", "threshold": 0.02}}
    theirs_left = bypass("token-mean", loss_type="reinforce", rollout_rs="token_k2", rollout_rs_threshold=0.02)
    yield "rejection, over the share that is left", ours.over_share_left(rule), theirs_left


def estimated() -> Iterator[Setting]:
    """Yield advantages, returns, KL estimates and the critic's loss."""
    yield "advantage grpo", ours.advantages("group_mean_std"), their_advantages("grpo", epsilon=1e-4)
    centered = their_advantages("grpo", norm_adv_by_std_in_grpo=False)
    yield "advantage dr_grpo", ours.advantages("group_mean"), centered
    yield "advantage rloo", ours.advantages("leave_one_out"), their_advantages("rloo")
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0)):
        yield f"gae {gamma:g} {lam:g}", ours.generalized(gamma, lam), their_generalized(gamma, lam)
    for gamma in (1.0, 0.9):
        yield f"reinforce_plus_plus {gamma:g}", ours.reinforce_plus_plus(gamma), their_reinforce_plus_plus(gamma)
    for kind in KL_ESTIMATORS:
        yield f"kl {kind}", ours.kl(kind), their_kl(kind)
    yield "value loss", ours.value_loss(0.5), their_value_loss(0.5)


def policy_loss(
    mode: str, aggregation: str, *, correction: dict[str, Any] | None = None, kl: float = 0.0, **actor: Any
) -> Side:
    """Return the loss against the behavior policy; with a correction it is against the proximal one, weighed by it."""

    def side(sample: Sample) -> Outcome:
        mask, rollout, old = (sample.padded(x_T) for x_T in (sample.mask_T, sample.behavior_T, sample.proximal_T))
        weights = None
        if correction is not None:
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(old - rollout, mask, **correction)

        def loss(current_T: torch.Tensor) -> Any:
            total, _ = core_algos.get_policy_loss_fn(mode)(
                old_log_prob=rollout if correction is None else old,
                log_prob=sample.padded(current_T),
                advantages=sample.padded(sample.spread(sample.advantages_S)),
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=_actor(**actor),
                rollout_is_weights=weights,
            )
            penalty = core_algos.kl_penalty(sample.padded(current_T), sample.padded(sample.reference_T), "k3")
            return total + kl * core_algos.agg_loss(penalty, mask, aggregation)

        return differentiated(sample, loss)

    return side


def bypass(aggregation: str, **correction: Any) -> Side:
    """Return verl's loss without proximal logprobs: the correction is of the current policy."""
    return policy_loss("bypass_mode", aggregation, policy_loss={"rollout_correction": correction})


def rejection(option: str, threshold: str | float) -> Side:
    """Return the trained tokens that verl's mask leaves."""

    def side(sample: Sample) -> Outcome:
        log_ratio = sample.padded(sample.proximal_T - sample.behavior_T)
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, sample.padded(sample.mask_T), option, threshold
        )
        return Outcome(sample.packed(kept))

    return side


def their_advantages(name: str, **options: Any) -> Side:
    """Return advantages at trained tokens, of a reward for each response."""

    def side(sample: Sample) -> Outcome:
        mask = sample.padded(sample.mask_T)
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = sample.rewards_S
        groups = np.array(sample.group.tolist())
        found, _ = core_algos.get_adv_estimator_fn(name)(rewards, mask, index=groups, **options)
        return Outcome(sample.packed(found) * sample.mask_T)

    return side


def their_generalized(gamma: float, lam: float) -> Side:
    """Return whitened advantages, and returns."""

    def side(sample: Sample) -> Outcome:
        rewards, values, mask = (sample.padded(x_T) for x_T in (sample.rewards_T, sample.values_T, sample.mask_T))
        both = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        return Outcome(torch.stack([sample.packed(each) * sample.mask_T for each in both]))

    return side


def their_reinforce_plus_plus(gamma: float) -> Side:
    """Return advantages and returns of tokens."""

    def side(sample: Sample) -> Outcome:
        both = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            sample.padded(sample.rewards_T), sample.padded(sample.mask_T), AlgoConfig(gamma=gamma)
        )
        return Outcome(torch.stack([sample.packed(each) for each in both]))

    return side


def their_kl(kind: str) -> Side:
    """Return the mean over trained tokens."""

    def side(sample: Sample) -> Outcome:
        def loss(current_T: torch.Tensor) -> Any:
            estimates = core_algos.kl_penalty(sample.padded(current_T), sample.padded(sample.reference_T), kind)
            return core_algos.agg_loss(estimates, sample.padded(sample.mask_T), "token-mean")

        return differentiated(sample, loss)

    return side


def their_value_loss(clip: float) -> Side:
    """Return the loss with the current logprobs as the critic's new values."""

    def side(sample: Sample) -> Outcome:
        returns, old, mask = (sample.padded(x_T) for x_T in (sample.rewards_T, sample.values_T, sample.mask_T))

        def loss(current_T: torch.Tensor) -> Any:
            return core_algos.compute_value_loss(sample.padded(current_T), returns, old, mask, clip)[0]

        return differentiated(sample, loss)

    return side


def _actor(**options: Any) -> Any:
    policy_loss = options.pop("policy_loss", None)
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **options)
    if policy_loss is not None:
        object.__setattr__(config, "policy_loss", policy_loss)
    return config
