"""The figures of one driver's run, computed in the same way for all from the times of its steps."""

from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean

import msgspec

FIRST = 5
"""The number of first steps that do not count towards speeds: engines start, and caches are cold."""

LAST = 5
"""The number of steps whose mean reward tells how far a run had come."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a driver's run."""

    end_s: float
    """Seconds from the command's start to the end of the step."""
    samples: int
    tokens: int
    """Response tokens of these samples."""
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
    engine_idle: float | None
    """The share of the time in which an engine had nothing to do; None if the run does not report it."""
    pause_per_update_s: float | None
    """Seconds for which an engine stands still for an update of its weights."""
    first_step_s: float
    """Seconds from the command's start to the end of the first step."""
    seconds: float
    """Seconds from the command's start to the end of the last step."""
    gpu_idle: list[float] | None = None
    """For each GPU, the share of the time in which no kernel ran; None on a CPU."""
    processor_ms_per_sample: float = 0.0
    """Milliseconds of all its processes' processor time for a sample, starts included."""
    rewards: list[float]
    """The mean reward of every step, by samples."""
    ends_s: list[float]
    """The seconds at which these steps ended, from the command's start."""
    pass_rate: float | None = None
    """The share of held-out prompts that the saved model solves; None if that was not measured."""
    model: str = ""
    """The directory of the saved model."""
    lag_mean: float = 0.0
    """The mean number of versions by which a sample's oldest token was behind the weights that it trained."""


def reward_after(run: Figures, *, samples: float | None = None, seconds: float | None = None) -> float | None:
    """Return the mean reward of the last steps within so many samples or seconds; None if none ended by then."""
    ended = len(run.rewards)
    if samples is not None:
        ended = min(ended, int(samples / run.samples_per_step + 0.5))
    if seconds is not None:
        ended = min(ended, bisect_right(run.ends_s, seconds))
    return round(fmean(run.rewards[max(0, ended - LAST) : ended]), 3) if ended else None


def figures_of(
    steps: Sequence[Step],
    *,
    engine_idle: float | None,
    pause_per_update_s: float | None,
    lag_mean: float = 0.0,
    first: int = FIRST,
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
        engine_idle=None if engine_idle is None else round(engine_idle, 3),
        pause_per_update_s=None if pause_per_update_s is None else round(pause_per_update_s, 4),
        first_step_s=round(steps[0].end_s, 1),
        seconds=round(steps[-1].end_s, 1),
        rewards=[round(step.reward, 3) for step in steps],
        ends_s=[round(step.end_s, 1) for step in steps],
        lag_mean=round(lag_mean, 2),
    )
