"""Resolves a recipe's names to functions of `algorithms`, and refuses those that do not fit together.

A loss of pairs takes the best response of each group against its worst one, by reward (online DPO); the two sequences
of a pair lie in one micro-batch (`learner.batching.clusters`).
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from msgspec import structs

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.aggregation import AGGREGATIONS, pair_mean
from headway.algorithms.correction_masks import BATCH_STATISTICS
from headway.algorithms.corrections import CORRECTIONS, PAIR_CORRECTIONS, TRUST_REGIONS, WEIGHTS
from headway.algorithms.metrics import Metrics
from headway.algorithms.objectives import IGNORES_ANCHOR, OBJECTIVES
from headway.algorithms.preferences import PREFERENCES, REFERENCE_FREE
from headway.algorithms.proximal import PROXIMAL
from headway.algorithms.returns import gae
from headway.algorithms.tokens import Tokens
from headway.algorithms.turns import TURN_ADVANTAGES
from headway.broker.errors import ConfigError
from headway.broker.schema import Group
from headway.broker.user_code.import_paths import load
from headway.broker.user_code.kinds import unknown_kind, unknown_option
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


log = logging.getLogger(__name__)

Surrogate = Callable[..., tuple[torch.Tensor, Metrics]]
"""The signature of objectives, users' own too; `algorithms.objectives` describes it. A loss of pairs has that of
`algorithms.preferences`."""
Advantage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Metrics]]
"""(rewards_S, group_S) -> (advantages_S, metrics); see `algorithms.advantages`."""
TurnAdvantage = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Metrics]]
"""(returns_K, rollout_K, group_S) -> (advantages_K, metrics); see `algorithms.turns`."""
Aggregation = Callable[..., torch.Tensor]
"""The signature of aggregations, and of `pair_mean`; `algorithms.aggregation` describes them."""

GAE = "gae"
"""The kind of advantages by a critic, which are no function of rewards alone."""
CALLER_ARGUMENTS = {"tokens", "sequences", "pairs", "mean_weight", "limit", "nll_length"}
"""Keyword arguments that the learner gives; a recipe cannot set them."""

POSITIVE = {"cap", "threshold", "budget", "length", "high", "tau_positive", "tau_negative", "beta"}
"""Options that make no sense at 0."""

OverRanks = Callable[[Sequence[float]], Sequence[float]]
"""Values of this rank -> each value summed (or its maximum taken) over all ranks."""


@dataclass(frozen=True)
class BoundCorrection:
    """A correction with the options of a recipe."""

    function: functools.partial[tuple[torch.Tensor, Metrics]]
    kind: str

    @property
    def needs_batch(self) -> bool:
        """True if the correction needs statistics of the whole update before the loss of its first micro-batch."""
        return self.kind in BATCH_STATISTICS

    @property
    def is_trust_region(self) -> bool:
        """True if the correction looks at the current policy, whatever the objective's anchor is."""
        return self.kind in TRUST_REGIONS

    def for_batch(
        self, policy_logprobs: Sequence[torch.Tensor], batches: Sequence[Tokens], sum_over_ranks: OverRanks
    ) -> "BoundCorrection":
        """Returns the correction with the statistics of the whole update bound; `policy_logprobs` are those that it
        will get. Collective if it `needs_batch`.
        """
        if not self.needs_batch:
            return self
        statistic, options = BATCH_STATISTICS[self.kind], self.function.keywords
        parts = [statistic.sums(*part, **options) for part in zip(policy_logprobs, batches, strict=True)]
        whole = torch.tensor(sum_over_ranks(torch.stack(parts).sum(0).tolist()), dtype=torch.float64)
        return replace(self, function=functools.partial(self.function, **statistic.settle(whole, **options)))


def needs_critic(config: AlgorithmConfig) -> bool:
    """True where advantages come from a value model."""
    return config.advantage.kind == GAE


def needs_proximal(config: AlgorithmConfig) -> bool:
    """True where the learner's logprobs before the step enter the loss, and no approximation takes their place."""
    return uses_proximal(config) and config.proximal == "recompute"


def uses_proximal(config: AlgorithmConfig) -> bool:
    """True where the objective has a ratio to the weights before the step. Corrections weigh these too, then."""
    return config.objective.anchor == "proximal" and config.objective.kind not in IGNORES_ANCHOR


def needs_teacher(config: AlgorithmConfig) -> bool:
    """True where a teacher's logprobs enter the advantages or the loss; every trajectory has them then."""
    return config.distillation.coefficient > 0


def weighs_distillation(config: AlgorithmConfig) -> bool:
    """True where a teacher's loss takes the ratio of the policy to the anchor as its weight, without gradient: the
    objective has that ratio, and no correction is the same one."""
    weighs = any(correction.kind in WEIGHTS for correction in config.corrections)
    return config.objective.kind not in IGNORES_ANCHOR and (uses_proximal(config) or not weighs)


def needs_reference(config: AlgorithmConfig) -> bool:
    """True where a reference model's logprobs enter the loss or the rewards."""
    return config.kl.coefficient > 0 or compares_with_reference(config)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raises ConfigError where parts are unknown or do not fit together."""
    if needs_critic(config):
        gae_options(config)
    else:
        open_advantage(config)
    open_surrogate(config)
    open_corrections(config)
    open_aggregation(config)
    check_pairs(config)
    _check_credit(config)
    _check_distillation(config)
    _check_entropy(config)
    _check_corrections(config)
    of_batch = [correction.kind for correction in config.corrections if correction.kind in BATCH_STATISTICS]
    if config.proximal != "recompute" and of_batch:
        raise ConfigError(
            f"algorithm.corrections: {' and '.join(of_batch)} looks at the whole batch before the first loss, which "
            f"takes the forward pass that algorithm.proximal={config.proximal} saves; set algorithm.proximal=recompute."
        )
    if config.proximal != "recompute" and not uses_proximal(config):
        raise ConfigError(
            f"algorithm.proximal={config.proximal} stands in for the learner's weights before the step, which nothing "
            "here uses; set algorithm.objective.anchor=proximal, with an objective that looks at it."
        )
    if needs_critic(config) and config.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling drops groups that teach nothing by comparison, but a critic "
            "(advantage.kind=gae) learns from each of them; set it to 0."
        )
    if config.dynamic_sampling and config.advantage.kind == "global_mean_std":
        raise ConfigError(
            "algorithm.dynamic_sampling drops groups whose samples all got the same reward, but "
            "advantage.kind=global_mean_std compares them with the whole batch and learns from them; set it to 0."
        )
    if config.kl.kind == "k1" and config.kl.place == "loss" and needs_reference(config):
        raise ConfigError(
            "algorithm.kl: the expected gradient of k1 in the loss is 0; take k2 or k3, or kl.place=reward."
        )
    if config.kl.ema_decay < 1 and not needs_reference(config):
        raise ConfigError(
            "algorithm.kl.ema_decay moves a reference that kl.coefficient=0 does not use; set one of them."
        )


def credits_turns(config: AlgorithmConfig) -> bool:
    """True where each turn of an episode has an advantage, or a reward, of its own."""
    return config.credit.kind == "turn"


def _check_credit(config: AlgorithmConfig) -> None:
    if config.credit.gamma != 1 and (not credits_turns(config) or needs_critic(config)):
        remedy = "set algorithm.advantage.options.gamma" if needs_critic(config) else "set algorithm.credit.kind=turn"
        raise ConfigError(
            f"algorithm.credit.gamma={config.credit.gamma:g} discounts the returns of turns, which nothing here uses;"
            f" {remedy}, or gamma=1."
        )
    if not credits_turns(config):
        return
    if not needs_critic(config):
        open_turn_advantage(config)
    if config.reward.length_normalized:
        raise ConfigError(
            "algorithm.reward.length_normalized divides the reward of a whole response, of which"
            " algorithm.credit.kind=turn gives each turn a part; set it to false, or credit.kind=episode."
        )
    if config.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling drops groups whose samples all got the same reward, but"
            " algorithm.credit.kind=turn compares their turns and learns from them; set it to 0."
        )


def _check_distillation(config: AlgorithmConfig) -> None:
    if needs_teacher(config) and is_of_pairs(config):
        raise ConfigError(
            f"algorithm.distillation.coefficient teaches by single tokens, at which {config.objective.kind}, a loss of"
            " pairs, does not look; set it to 0, or take algorithm.preset=distillation."
        )
    if config.distillation.candidates and config.distillation.place == "advantage":
        raise ConfigError(
            f"algorithm.distillation.top_k={config.distillation.top_k} compares whole distributions, which is a loss"
            " and no advantage of the sampled token; set algorithm.distillation.place=loss, or top_k=0."
        )
    if needs_teacher(config) and config.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling drops groups whose samples all got the same reward, but a teacher"
            " (distillation.coefficient above 0) teaches by them, too; set it to 0."
        )
    if config.advantage.kind == "none" and not needs_teacher(config):
        raise ConfigError(
            "algorithm.advantage.kind=none leaves nothing to learn from without a teacher; set"
            " algorithm.distillation.coefficient above 0, with teacher.path, or another advantage."
        )


def _check_entropy(config: AlgorithmConfig) -> None:
    if not config.entropy_coefficient:
        return
    if is_of_pairs(config):
        raise ConfigError(
            f"algorithm.entropy_coefficient={config.entropy_coefficient:g} rewards the entropy at single tokens, at"
            f" which {config.objective.kind}, a loss of pairs, does not look; set it to 0."
        )
    if config.distillation.candidates:
        raise ConfigError(
            f"algorithm.entropy_coefficient={config.entropy_coefficient:g} does not fit"
            f" algorithm.distillation.top_k={config.distillation.top_k}: the learner computes the policy's entropy, or"
            " its logprobs of a teacher's candidates, but not both. Set one of the two to 0."
        )


def _check_corrections(config: AlgorithmConfig) -> None:
    objective = config.objective
    weights = [correction.kind for correction in config.corrections if correction.kind in WEIGHTS]
    if len(weights) > 1:
        raise ConfigError(
            f"algorithm.corrections: {' and '.join(weights)} each multiply by proximal / behavior, "
            "which would count the same lag twice; keep one."
        )
    if not weights or objective.kind not in OBJECTIVES or uses_proximal(config):
        return
    if objective.kind not in IGNORES_ANCHOR:
        raise ConfigError(
            f"algorithm.corrections: {weights[0]} with objective {objective.kind} anchored to the "
            "behavior policy would count the ratio to the behavior policy twice; set "
            "algorithm.objective.anchor=proximal, or drop the correction."
        )
    if weights[0] == "decoupled":
        raise ConfigError(
            "algorithm.corrections: decoupled weighs the proximal policy against the behavior policy and leaves the "
            f"rest of the ratio to the objective, but {objective.kind} has no ratio; take one that has, with "
            "algorithm.objective.anchor=proximal, or use truncated_is, which weighs the current policy."
        )


def open_advantage(config: AlgorithmConfig) -> Advantage:
    """Returns the advantage function with its options bound; a user's own is imported."""
    advantage: Advantage = open_part(config.advantage, ADVANTAGES, "algorithm.advantage", also=(GAE,))
    return advantage


def open_turn_advantage(config: AlgorithmConfig) -> TurnAdvantage:
    """Returns the function of turns that the advantage of rollouts names, with its options bound. Raises
    ConfigError."""
    if config.advantage.kind not in TURN_ADVANTAGES:
        raise ConfigError(
            f"algorithm.credit.kind=turn compares returns of turns, which advantage.kind={config.advantage.kind} does"
            f" not; set algorithm.advantage.kind to {', '.join(TURN_ADVANTAGES)} or {GAE}, or credit.kind=episode."
        )
    advantage: TurnAdvantage = open_part(config.advantage, TURN_ADVANTAGES, "algorithm.advantage")
    return advantage


def gae_options(config: AlgorithmConfig) -> dict[str, float]:
    """Returns gamma and lam of a critic's advantages. Raises ConfigError."""
    options = open_part(config.advantage, {GAE: gae}, "algorithm.advantage").keywords
    return {name: options.get(name, parameter.default) for name, parameter in options_of(gae).items()}


def open_surrogate(config: AlgorithmConfig) -> Surrogate:
    """Returns the objective, or the loss of pairs, with its options bound."""
    surrogate: Surrogate = open_part(config.objective, {**OBJECTIVES, **PREFERENCES}, "algorithm.objective")
    return surrogate


def open_corrections(config: AlgorithmConfig) -> list[BoundCorrection]:
    """Returns the corrections in order, with their options bound."""
    known = {**CORRECTIONS, **PAIR_CORRECTIONS}
    return [
        BoundCorrection(open_part(correction, known, "algorithm.corrections"), correction.kind)
        for correction in config.corrections
    ]


def open_aggregation(config: AlgorithmConfig, max_new_tokens: int | None = None) -> Aggregation:
    """Returns the aggregation with its options bound; `max_new_tokens` is the default length of a fixed denominator."""
    chosen = config.aggregation
    if chosen.kind == "fixed_denominator":
        chosen = structs.replace(chosen, options={"length": max_new_tokens or 1, **chosen.options})
    known = {**AGGREGATIONS, PAIR_MEAN: pair_mean}
    aggregation: Aggregation = open_part(chosen, known, "algorithm.aggregation")
    return aggregation


def open_proximal(config: AlgorithmConfig) -> Callable[..., torch.Tensor] | None:
    """Returns the function that replaces a forward pass of the proximal policy; None if there is none."""
    return PROXIMAL.get(config.proximal)


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the options of a function that a recipe may set: its keyword-only arguments."""
    parameters = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in CALLER_ARGUMENTS
    }


def open_part(part: Any, known: Mapping[str, Any], where: str, also: tuple[str, ...] = ()) -> Any:
    """Returns the function that `part.kind` names with `part.options` bound; options of built-in ones are checked."""
    if ":" in part.kind:
        return functools.partial(load(part.kind, f"{where}.kind"), **part.options)
    if part.kind not in known:
        raise unknown_kind(part.kind, [*known, *also], f"{where}.kind")
    function, possible = known[part.kind], options_of(known[part.kind])
    options = _renamed(part.kind, part.options, f"{where}.options")
    for name, value in options.items():
        _check_option(part.kind, name, value, possible, f"{where}.options")
    lacking = [name for name, one in possible.items() if one.default is inspect.Parameter.empty and name not in options]
    if lacking:
        raise ConfigError(f"{where}.options: {part.kind} needs {' and '.join(lacking)}, which has no default; set it.")
    return functools.partial(function, **options)


def _renamed(kind: str, options: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the options under today's names. Older recipes call the age weight's limit max_lag, 0 for no limit."""
    if kind != "age_weight" or "max_lag" not in options:
        return options
    if "zero_above_lag" in options:
        raise ConfigError(f"{where} of age_weight: max_lag is the former name of zero_above_lag; keep one.")
    rest = {name: value for name, value in options.items() if name != "max_lag"}
    _hint_at_new_name(f"{where}.max_lag of age_weight is called zero_above_lag now; instead of 0 leave it out.")
    return {**rest, "zero_above_lag": options["max_lag"] or None}


@functools.cache
def _hint_at_new_name(hint: str) -> None:
    """Logs the hint once a process, since a recipe is checked more than once."""
    log.warning("%s", hint)


def _check_option(kind: str, name: str, value: Any, possible: Mapping[str, inspect.Parameter], where: str) -> None:
    if name not in possible:
        raise unknown_option(name, possible, where, of=kind)
    try:
        msgspec.convert(value, possible[name].annotation)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}.{name} of {kind}: {error}") from error
    if isinstance(value, int | float) and value < 0:
        raise ConfigError(f"{where}.{name} of {kind} is {value}; it is 0 or more.")
    if name in POSITIVE and not value > 0:
        raise ConfigError(f"{where}.{name} of {kind} is {value}; it must be above 0.")
    if name == "label_smoothing" and value >= 0.5:
        raise ConfigError(
            f"{where}.label_smoothing of {kind} is {value}; it must be below 0.5, or labels mean nothing."
        )
    if name == "dual_clip" and 0 < value <= 1:
        raise ConfigError(f"{where}.dual_clip of {kind} is {value}; it must be above 1, as the ratio is where it acts.")
