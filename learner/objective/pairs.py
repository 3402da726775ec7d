"""Losses of pairs on sampled groups: the best response of each group against its worst one, by reward (online DPO).

    groups ─ advantage best_against_worst ─► +1, -1, 0 ─ pairs_of ─► chosen, rejected, chosen, rejected, ...

The two sequences of a pair lie in one micro-batch (`learner.rows.units`). No other sequence goes through a model.
"""

from collections.abc import Sequence

from headway.algorithms.corrections import PAIR_CORRECTIONS
from headway.algorithms.preferences import PREFERENCES, REFERENCE_FREE
from headway.broker.errors import ConfigError
from headway.broker.schema import Group
from headway.learner.algorithm_config import AlgorithmConfig

BEST_AGAINST_WORST = "best_against_worst"
"""The kind of advantages that makes pairs."""
PAIR_MEAN = "pair_mean"
"""The kind of the only aggregation over pairs."""

_NEEDED = {
    "advantage.kind": (BEST_AGAINST_WORST, "which takes the best and the worst response of a group"),
    "objective.anchor": ("reference", "which compares the policy with a reference"),
    "aggregation.kind": (PAIR_MEAN, "which has one loss for both responses of a pair"),
    "proximal": ("recompute", "which uses no weights before the step"),
}
"""The values that a loss of pairs needs, with the reason."""


def is_of_pairs(config: AlgorithmConfig) -> bool:
    """True where the loss compares two responses."""
    return config.objective.kind in PREFERENCES


def compares_with_reference(config: AlgorithmConfig) -> bool:
    """True for a loss of pairs that needs the logprobs of a reference model."""
    return is_of_pairs(config) and config.objective.kind not in REFERENCE_FREE


def check_pairs(config: AlgorithmConfig) -> None:
    """Raises ConfigError where a loss of pairs meets parts that are of tokens, or a loss of tokens those of pairs."""
    if is_of_pairs(config):
        _check_loss_of_pairs(config)
    else:
        _check_loss_of_tokens(config)


def pairs_of(groups: Sequence[Group], advantages: Sequence[float], has_loss: Sequence[bool]) -> list[tuple[int, int]]:
    """Returns the indices of the chosen and the rejected trajectory of each group that has two such.

    A group has none where all rewards are equal, or where no token of one of the two is in a loss (`has_loss`), because
    it is over the staleness bound or is left out. `advantages` and `has_loss` have an entry for each trajectory of
    `groups`, in order.
    """
    pairs, end = [], 0
    for group in groups:
        mine = range(end, end := end + len(group.trajectories))
        chosen = [index for index in mine if advantages[index] > 0]
        rejected = [index for index in mine if advantages[index] < 0]
        if all(has_loss[index] for index in (*chosen, *rejected)):
            pairs += list(zip(chosen, rejected, strict=True))
    return pairs


def _check_loss_of_pairs(config: AlgorithmConfig) -> None:
    kind = config.objective.kind
    found = {
        "advantage.kind": config.advantage.kind,
        "objective.anchor": config.objective.anchor,
        "aggregation.kind": config.aggregation.kind,
        "proximal": config.proximal,
    }
    for key, (needed, reason) in _NEEDED.items():
        if found[key] != needed:
            raise ConfigError(
                f"algorithm.{key}={found[key]} does not fit algorithm.objective.kind={kind}, {reason}; set"
                f" algorithm.{key}={needed}, as algorithm.preset=online_dpo does."
            )
    if others := [correction.kind for correction in config.corrections if correction.kind not in PAIR_CORRECTIONS]:
        raise ConfigError(
            f"algorithm.corrections: {' and '.join(others)} would weigh single tokens or responses, but {kind} has one"
            f" loss for both responses of a pair; take {', '.join(PAIR_CORRECTIONS)}, or none."
        )
    if config.kl.coefficient:
        raise ConfigError(
            f"algorithm.kl.coefficient={config.kl.coefficient:g} does not fit algorithm.objective.kind={kind}: a loss"
            " of pairs takes no penalty beside it; set it to 0, and hold the policy near its reference by"
            " algorithm.objective.options.beta."
        )


def _check_loss_of_tokens(config: AlgorithmConfig) -> None:
    kind, losses = config.objective.kind, ", ".join(PREFERENCES)
    if config.objective.anchor == "reference":
        raise ConfigError(
            f"algorithm.objective.anchor=reference is for losses of pairs ({losses}), and {kind} is none; set it to"
            " behavior or proximal, and algorithm.kl.coefficient to stay near a reference."
        )
    if config.aggregation.kind == PAIR_MEAN:
        raise ConfigError(
            f"algorithm.aggregation.kind={PAIR_MEAN} is for losses of pairs ({losses}), and {kind} has a loss for each"
            " token; set it to token_mean."
        )
    if of_pairs := [correction.kind for correction in config.corrections if correction.kind in PAIR_CORRECTIONS]:
        raise ConfigError(
            f"algorithm.corrections: {of_pairs[0]} weighs pairs, which {kind} does not have; take"
            " sequence_truncated_is, which weighs responses."
        )
