"""The figures of one driver's run, computed in the same way for all from the times of its steps, and compared."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from .race import AGENT, HEADWAY, LONG_TAILED, SHORT

FIRST = 5
"""The number of first steps that do not count towards speeds: engines start, and caches are cold."""
TARGETS = {(2, SHORT): 2.0, (2, LONG_TAILED): 3.0, (1, AGENT): 2.0, (2, AGENT): 2.0}
"""The targets by the number of GPUs and the task: so many times the samples per second of the fastest peer."""
TARGET = 1.5
"""The target elsewhere."""
NOISE = 0.04
"""The largest distance between two pass rates that are equal: three standard errors of a difference at 512 prompts, of
which 0.95 are solved."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a driver's run."""

    end_s: float
    """Seconds from the command's start to the end of the step."""
    samples: int
    tokens: int
    """Response tokens of these samples, of episodes those that were sampled."""
    reward: float
    """Their mean reward."""
    learner_idle_s: float
    """Seconds of the step in which nothing was trained."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a driver; speeds and shares are of the steps after the first ones."""

    samples_per_step: float
    samples_per_s: float
    tokens_per_s: float
    response_tokens: float
    """The mean number of tokens of a response."""
    learner_idle: float
    """The share of the time in which nothing was trained."""
    seconds: float
    """Seconds from the command's start to the end of the last step."""
    rewards: list[float]
    """The mean reward of every step, by samples."""
    ends_s: list[float]
    """The seconds at which these steps ended, from the command's start."""
    lag_mean: float = 0.0
    """The mean number of versions by which a sample's oldest token was behind the weights that it trained."""
    weight_sync_s: float = 0.0
    """The mean seconds for which generation paused while weights were sent; 0 for a contestant that does not tell."""
    gpu_idle: list[float] | None = None
    """For each GPU, the share of the time in which no kernel ran; None on a CPU."""
    pass_rate: float | None = None
    """The share of held-out prompts that the saved model solves; None if that was not measured."""
    model: str = ""
    """The directory of the saved model."""


def figures_of(
    steps: Sequence[Step], *, lag_mean: float = 0.0, weight_sync_s: float = 0.0, first: int = FIRST
) -> Figures:
    """Return the figures of a run of at least two steps, of which the first `first` do not count."""
    first = min(first, len(steps) - 1)
    counted, seconds = steps[first:], steps[-1].end_s - steps[first - 1].end_s
    samples, tokens = sum(step.samples for step in counted), sum(step.tokens for step in counted)
    return Figures(
        samples_per_step=round(samples / len(counted), 1),
        samples_per_s=round(samples / seconds, 1),
        tokens_per_s=round(tokens / seconds, 1),
        response_tokens=round(tokens / samples, 1),
        learner_idle=round(sum(step.learner_idle_s for step in counted) / seconds, 3),
        seconds=round(steps[-1].end_s, 1),
        rewards=[round(step.reward, 3) for step in steps],
        ends_s=[round(step.end_s, 1) for step in steps],
        lag_mean=round(lag_mean, 2),
        weight_sync_s=round(weight_sync_s, 3),
    )


def compared(rounds: Mapping[str, Sequence[Figures]], target: float = TARGET) -> dict[str, Any]:
    """Return every contestant's median run, the slower one of the middle two, and Headway over the fastest peer."""
    runs = {
        name: sorted(of_name, key=lambda run: run.samples_per_s)[(len(of_name) - 1) // 2]
        for name, of_name in rounds.items()
        if of_name
    }
    found: dict[str, Any] = {name: msgspec.to_builtins(run) for name, run in runs.items()}
    found["samples_per_s"] = {name: [run.samples_per_s for run in of_name] for name, of_name in rounds.items()}
    if HEADWAY not in runs or len(runs) == 1:
        return found
    speeds = {name: median(run.samples_per_s for run in rounds[name]) for name in runs}
    best = max(runs.keys() - {HEADWAY}, key=lambda name: speeds[name])
    times, ours, peer = round(speeds[HEADWAY] / speeds[best], 2), runs[HEADWAY].pass_rate, runs[best].pass_rate
    met = {f"{target} times the samples per second": times >= target}
    if ours is not None and peer is not None:
        met["held-out pass rate equal or better"] = ours >= peer - NOISE
    return {**found, "best_of_peers": best, "times_faster": times, "target": target, "met": met}
