"""Computes every figure from a run's events, as summary, plots, `headway status` and sinks show them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeVar, overload

from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.step_metrics import LagFigures, StepMetrics

from .events import EvaluationEvent

Value = TypeVar("Value")

EDGE_STEPS = 3
"""Steps of which `reward_first` and `reward_last` are means."""
WINDOW = 5
"""Steps of the moving average."""


def finite(value: float) -> float | None:
    """Return the value, or None for one that JSON cannot express."""
    return value if math.isfinite(value) else None


def trained_per_s(steps: Sequence[StepMetrics]) -> float:
    """Return tokens trained per second of these steps, waiting included; 0 without steps."""
    seconds = sum(step.step_s for step in steps)
    return sum(step.trained_tokens for step in steps) / seconds if seconds else 0.0


def wait_fraction(steps: Sequence[StepMetrics]) -> float:
    """Return the share of these steps' time in which the learner waited for a batch, from 0 to 1."""
    seconds = sum(step.step_s for step in steps)
    return sum(step.take_s for step in steps) / seconds if seconds else 0.0


def generated_per_s(workers: Sequence[WorkerInfo]) -> float:
    """Return tokens that these workers generate per second, by their own count."""
    return sum(worker.tokens_per_s for worker in workers)


def lag_histogram(steps: Sequence[StepMetrics]) -> dict[int, int]:
    """Return the number of trajectories that these steps trained, by lag."""
    return _summed(step.lag_histogram for step in steps)


def _summed(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for histogram in histograms:
        counts.update(histogram)
    return dict(sorted(counts.items()))


def by_lag(steps: Sequence[StepMetrics]) -> dict[int, LagFigures]:
    """Return the figures of all that these steps trained, by the largest lag of each bucket."""
    found: dict[int, list[LagFigures]] = {}
    for step in steps:
        for lag, figures in step.by_lag.items():
            found.setdefault(lag, []).append(figures)
    return {lag: _together(parts) for lag, parts in sorted(found.items())}


def _together(parts: Sequence[LagFigures]) -> LagFigures:
    """Return the figures of one bucket over several steps: means by trajectory or token, and the ESS of all tokens."""
    return LagFigures(
        trajectories=sum(part.trajectories for part in parts),
        tokens=sum(part.tokens for part in parts),
        reward_mean=_mean([(part.trajectories, part.reward_mean) for part in parts]),
        ratio_mean=_mean([(part.tokens, part.ratio_mean) for part in parts]),
        ess=_ess([(part.tokens, part.ratio_mean, part.ess) for part in parts if part.ratio_mean and part.ess]),
        clip_fraction=_mean([(part.tokens, part.clip_fraction) for part in parts]),
        mask_fraction=_mean([(part.tokens, part.mask_fraction) for part in parts]),
        reverse_kl=_mean([(part.tokens, part.reverse_kl) for part in parts]),
    )


def _mean(weighed: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the mean of the numbers, each with its weight; None without one."""
    known = [(weight, number) for weight, number in weighed if number is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * number for weight, number in known) / total if total else None


def _ess(parts: Sequence[tuple[int, float, float]]) -> float | None:
    """Return the effective sample size of all parts together; each has its tokens, mean weight and own size."""
    tokens, total = sum(tokens for tokens, _, _ in parts), sum(tokens * mean for tokens, mean, _ in parts)
    squares = sum(tokens * mean**2 / ess for tokens, mean, ess in parts)
    return total**2 / (tokens * squares) if squares else None


def trained_by_step_of_weights(steps: Sequence[StepMetrics]) -> dict[int, int]:
    """Return the number of trajectories that these steps trained, by the step of the oldest weights that sampled a
    token of them."""
    return _by_step_of_weights((step.step, step.lag_histogram) for step in steps)


def trained_tokens_by_step_of_weights(steps: Sequence[StepMetrics]) -> dict[int, int]:
    """Return the number of tokens that these steps trained, by the step of the weights that sampled them."""
    return _by_step_of_weights((step.step, step.token_lag_histogram) for step in steps)


def trained_by_response_length(steps: Sequence[StepMetrics]) -> dict[int, int]:
    """Return the number of samples that these steps trained, by the tokens of the response up to a power of two."""
    return _summed(step.response_length_histogram for step in steps)


def _by_step_of_weights(lags: Iterable[tuple[int, Mapping[int, int]]]) -> dict[int, int]:
    return _summed({step - lag: count for lag, count in histogram.items()} for step, histogram in lags)


@overload
def moving_average(values: Sequence[float], window: int = WINDOW) -> list[float]: ...
@overload
def moving_average(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]: ...
def moving_average(values: Sequence[float | None], window: int = WINDOW) -> Sequence[float | None]:
    """Return at every point the mean of those of the last `window` values that are known; None where none is."""
    known = ([value for value in span if value is not None] for span in _windows(values, window))
    return [sum(span) / len(span) if span else None for span in known]


def trained_per_s_on_average(steps: Sequence[StepMetrics], window: int = WINDOW) -> list[float]:
    """Return at every step the tokens trained per second of the last `window` steps, waiting included."""
    return [trained_per_s(span) for span in _windows(steps, window)]


def _windows(values: Sequence[Value], window: int) -> Iterator[Sequence[Value]]:
    return (values[max(0, end - window) : end] for end in range(1, len(values) + 1))


def learned(lineage: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return the sums over the steps that lead to the last weights, by the summary's keys."""
    rewards = [step.reward_mean for step in lineage]
    compared = next((step.algorithm for step in lineage if "agreement_mean" in step.algorithm), {})
    return {
        "reward_first": fmean(rewards[:EDGE_STEPS]) if rewards else None,
        "reward_last": fmean(rewards[-EDGE_STEPS:]) if rewards else None,
        "steps": len(lineage),
        "weight_versions": len(lineage) + 1,
        "mixed_version_trajectories": sum(step.mixed_version_trajectories for step in lineage),
        "untrained_trajectories": sum(step.untrained_trajectories for step in lineage),
        "trained_tokens": sum(step.trained_tokens for step in lineage),
        **{name: number for name, number in compared.items() if name.startswith("agreement_")},
    }


def spent(steps: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return what all work cost, by the summary's keys. `steps` includes abandoned ones, whose time was spent too."""
    return {
        "wall_s": _wall_s(steps),
        "trained_tokens_per_s": trained_per_s(steps),
        "learner_wait_fraction": wait_fraction(steps),
        "publish_s_p50": median(step.publish_s for step in steps) if steps else 0.0,
    }


def evaluated(lineage: Sequence[EvaluationEvent]) -> dict[str, Any]:
    """Return the first and the last pass rate, by the summary's keys; None for one that was not measured."""
    rates = [evaluation.pass_rate for evaluation in lineage]
    return {"eval_before": rates[0] if rates else None, "eval_after": rates[-1] if len(rates) > 1 else None}


def _wall_s(steps: Sequence[StepMetrics]) -> float:
    """Return the sum over incarnations: each counts its own time from 0."""
    longest: dict[int, float] = {}
    for step in steps:
        longest[step.incarnation] = max(step.time_s, longest.get(step.incarnation, 0.0))
    return sum(longest.values())
