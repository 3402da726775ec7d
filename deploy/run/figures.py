"""Computes every figure from a run's events, as summary, plots, `headway status` and sinks show them."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from broker.schema import StepMetrics, WorkerInfo

from .events import EvaluationEvent

EDGE_STEPS = 3
"""Steps of which `reward_first` and `reward_last` are means."""
WINDOW = 5
"""Steps of the moving average."""


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
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(step.lag_histogram)
    return dict(sorted(counts.items()))


def trained_by_step_of_weights(steps: Sequence[StepMetrics]) -> dict[int, int]:
    """Return the number of trajectories that these steps trained, by the step of the oldest weights that sampled a
    token of them."""
    counts: Counter[int] = Counter()
    for step in steps:
        for lag, count in step.lag_histogram.items():
            counts[step.step - lag] += count
    return dict(sorted(counts.items()))


def moving_average(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return at every point the mean of the last `window` values, or of fewer at the start."""
    spans = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(span) / len(span) for span in spans]


def learned(lineage: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return the sums over the steps that lead to the last weights, by the summary's keys."""
    rewards = [step.reward_mean for step in lineage]
    return {
        "reward_first": fmean(rewards[:EDGE_STEPS]) if rewards else None,
        "reward_last": fmean(rewards[-EDGE_STEPS:]) if rewards else None,
        "steps": len(lineage),
        "weight_versions": len(lineage) + 1,
        "mixed_version_trajectories": sum(step.mixed_version_trajectories for step in lineage),
        "trained_tokens": sum(step.trained_tokens for step in lineage),
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
