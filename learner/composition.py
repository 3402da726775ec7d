"""Which functions of `algorithms` a recipe's names stand for, and which of them fit together."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from algorithms import advantages, aggregation, kl
from algorithms.corrections import importance
from algorithms.metrics import Metrics
from algorithms.objectives.gspo import gspo
from algorithms.objectives.policy_gradient import policy_gradient
from algorithms.objectives.ppo_clip import ppo_clip
from broker.errors import ConfigError

from .choices import import_own, unknown_kind
from .config import AlgorithmConfig, CorrectionConfig, ObjectiveConfig

Surrogate = Callable[..., tuple[torch.Tensor, Metrics]]
"""See `algorithms.objectives` for the signature, which is that of users' own."""
Correction = Callable[..., tuple[torch.Tensor, Metrics]]
"""See `algorithms.corrections`."""
Advantage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Metrics]]
"""(rewards_S, group_S) -> (advantages_S, metrics); see `algorithms.advantages`."""

ADVANTAGES: dict[str, Advantage] = {
    "group_mean_std": advantages.group_mean_std,
    "group_mean": advantages.group_mean,
    "leave_one_out": advantages.leave_one_out,
}
OBJECTIVES: dict[str, Surrogate] = {"ppo_clip": ppo_clip, "gspo": gspo, "policy_gradient": policy_gradient}
CORRECTIONS: dict[str, Correction] = {
    "truncated_is": importance.truncated_is,
    "sequence_truncated_is": importance.sequence_truncated_is,
    "geometric_truncated_is": importance.geometric_truncated_is,
    "decoupled": importance.decoupled,
}
AGGREGATIONS = {"token_mean": aggregation.token_mean, "sequence_mean": aggregation.sequence_mean}
PENALTIES = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def needs_proximal(config: AlgorithmConfig) -> bool:
    """True where the learner's logprobs before the update enter the loss."""
    return config.objective.anchor == "proximal" and (
        config.objective.kind != "policy_gradient" or bool(config.corrections)
    )


def needs_reference(config: AlgorithmConfig) -> bool:
    """True where a reference model's logprobs enter the loss."""
    return config.kl.coefficient > 0


def open_advantage(kind: str) -> Advantage:
    """The advantage function of that name, or the user's own."""
    advantage: Advantage = _named(kind, ADVANTAGES, "algorithm.advantage")
    return advantage


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise ConfigError where the parts are unknown or do not fit together."""
    objective, corrections = config.objective, [correction.kind for correction in config.corrections]
    open_advantage(config.advantage)
    open_surrogate(objective)
    for correction in config.corrections:
        open_correction(correction)
    built_in = [kind for kind in corrections if kind in CORRECTIONS]
    if len(built_in) > 1:
        raise ConfigError(
            f"algorithm.corrections: {' and '.join(built_in)} each multiply by proximal / behavior, "
            "which would count the same lag twice; keep one."
        )
    if not built_in or objective.anchor == "proximal" or objective.kind not in OBJECTIVES:
        return
    if objective.kind != "policy_gradient":
        raise ConfigError(
            f"algorithm.corrections: {built_in[0]} with objective {objective.kind} anchored to the "
            "behavior policy would count the ratio to the behavior policy twice; set "
            "algorithm.objective.anchor=proximal, or drop the correction."
        )
    if built_in[0] == "decoupled":
        raise ConfigError(
            "algorithm.corrections: decoupled weighs the proximal policy against the behavior policy; set "
            "algorithm.objective.anchor=proximal, or use truncated_is, which weighs the current one."
        )


def open_surrogate(config: ObjectiveConfig) -> Surrogate:
    """The objective with its options bound."""
    function: Surrogate = _named(config.kind, OBJECTIVES, "algorithm.objective.kind")
    if config.kind not in OBJECTIVES:
        return functools.partial(function, **config.options)
    _refuse_options(config.kind, config.options, "algorithm.objective.options")
    if config.kind == "policy_gradient":
        return function
    return functools.partial(function, clip_low=config.clip_low, clip_high=config.clip_high)


def open_correction(config: CorrectionConfig) -> Correction:
    """The correction with its options bound."""
    function: Correction = _named(config.kind, CORRECTIONS, "algorithm.corrections.kind")
    if config.kind not in CORRECTIONS:
        options = config.options if config.cap is None else {"cap": config.cap, **config.options}
        return functools.partial(function, **options)
    _refuse_options(config.kind, config.options, "algorithm.corrections.options")
    if config.cap is None:
        return function
    if config.kind == "decoupled":
        raise ConfigError(
            f"algorithm.corrections: decoupled has no cap, but cap={config.cap:g} is set; "
            "with a cap it is truncated_is."
        )
    return functools.partial(function, cap=config.cap)


def _refuse_options(kind: str, options: dict[str, Any], where: str) -> None:
    if options:
        raise ConfigError(
            f"{where}: {kind} takes none, but got {', '.join(options)}; they are for functions of your own."
        )


def _named(kind: str, known: dict[str, Any], where: str) -> Any:
    if kind in known:
        return known[kind]
    if ":" in kind:
        return import_own(kind, where)
    raise unknown_kind(kind, known, where)
