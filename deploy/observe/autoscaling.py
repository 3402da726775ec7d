"""The rule by which a pool of workers grows and shrinks.

    out  the learner waits for more than `wait` of its time, and the workers are busy
    in   the learner hardly waits (for less than half of `wait`), and workers are idle, or the lag or the queue's age is
         close to the steps for which samples are begun ahead (`staleness.ahead`, by default `staleness.max_lag`)

A mean lag of so many steps means that all admitted groups are begun: then admission bounds generation, and not the
workers. The queue's age is the time for which the oldest ready group has waited for the learner, over the time of so
many steps: at 1 its samples will have this lag even if they were of the newest weights when it became ready. Whether
workers are busy is judged by those of the pool alone, where they can be told by their names.

A learner that waits beside idle workers is bound by admission (`staleness.max_lag` and `staleness.ahead`), prompts or
the learner itself, and more workers would change nothing. Workers that generate faster than the learner trains fill the
admitted groups, so they become idle and their samples grow old in the queue: fewer workers do the same, with less lag.

The pool grows to the number at which the learner would wait for `wait` of its time if samples came in proportion to
workers, at most twofold at a time, and shrinks by the idle share, at most by half. After a change the rule waits until
all workers run and `steps` steps were made since. It does not shrink to a number at which the learner starved before,
until the learner's pace has changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.broker.schema.metrics import StepMetrics
from headway.broker.schema.status import PoolInfo, QueueAges, RunStatus, WorkerInfo
from headway.deploy.run.figures import wait_fraction

NEAR = 0.9
"""A mean lag, or a queue's age, of this share of the steps for which samples are begun ahead is close to them."""
OTHER_PACE = 1.25
"""A learner whose training seconds a step changed by this factor has another pace."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The range in which the rule keeps a pool."""

    least: int = 1
    most: int
    wait: float = 0.1
    """The share of its time for which the learner may wait for samples."""
    busy: float = 0.6
    """The share of the engines' places that are in use, below which workers count as idle."""
    steps: int = 5
    """The steps from which the learner's wait is measured."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The figures that the rule looks at."""

    wanted: int
    """Workers that the pool should have."""
    running: int
    steps: int
    """Steps made since the pool last changed."""
    wait: float
    """The share of the last steps' time in which the learner waited for samples."""
    busy: float
    """The share of the places in use in the pool's engines, over the last looks."""
    lag: float
    """The mean lag over the steps for which samples are begun ahead; 0 where these are 0. Above 1 where samples take
    longer."""
    age: float = 0.0
    """The wait of the oldest ready group over the time of these steps; 0 where they are 0."""
    train_s: float
    """The learner's mean training seconds of a step."""

    @classmethod
    def of(
        cls, status: RunStatus, pool: PoolInfo, since: int, ahead: float, targets: Targets, busy: Sequence[float]
    ) -> "Load":
        """Returns the load of a look at the run.

        `since`: the number of steps made when the pool last changed; `ahead`: the steps beyond the next one for which
        samples are begun; `busy`: `busy_share` at this look and the last.
        """
        made = steps_made(status)
        recent = status.recent_steps[-max(1, min(targets.steps, made - since)) :]
        return cls(
            wanted=pool.wanted,
            running=pool.running,
            steps=made - since,
            wait=wait_fraction(recent),
            busy=sum(busy) / len(busy),
            lag=_mean_lag(recent) / ahead if ahead else 0.0,
            age=_age(status.ages, recent, ahead),
            train_s=sum(step.train_s for step in recent) / len(recent) if recent else 0.0,
        )


@dataclass(frozen=True)
class Decision:
    """The number of workers wanted from now on, and why."""

    wanted: int
    reason: str
    """The same words for the same cause."""
    figures: str
    """The figures that the rule saw, in words."""

    def __str__(self) -> str:
        return f"{self.figures}: {self.reason}."


@dataclass
class Autoscaler:
    """Decides for one pool; it remembers at which number of workers the learner starved."""

    targets: Targets
    starved_at: int = field(default=0, init=False)
    """The largest number of workers at which the learner starved; 0: none."""
    starved_pace_s: float = field(default=0.0, init=False)
    """The learner's training seconds of a step then."""

    def decide(self, load: Load) -> Decision:
        """Returns what to do now; `wanted` is as before where nothing is to be changed."""
        targets = self.targets
        if not targets.least <= load.wanted <= targets.most:
            figures = f"{load.wanted} workers are wanted"
            return Decision(
                min(max(load.wanted, targets.least), targets.most), "that is outside of the limits", figures
            )
        if load.running < load.wanted:
            figures = f"{load.running} of {load.wanted} workers run"
            return Decision(load.wanted, "the others still start", figures)
        if load.steps < targets.steps:
            figures = f"The learner has made {load.steps} of {targets.steps} steps since the last change"
            return Decision(load.wanted, "too few to judge by", figures)
        self._forget_other_pace(load)
        if load.wait > targets.wait:
            return self._starved(load)
        if load.wait <= targets.wait / 2 and (load.busy < targets.busy or max(load.lag, load.age) >= NEAR):
            return self._idle(load)
        return Decision(load.wanted, "within the targets", _seen(load))

    def _starved(self, load: Load) -> Decision:
        targets, seen = self.targets, _seen(load)
        if load.busy < targets.busy:
            reason = "samples are held up by the bound on lag, staleness.ahead or prompts, not for want of workers"
            return Decision(load.wanted, reason, seen)
        if load.wanted > self.starved_at:
            self.starved_at, self.starved_pace_s = load.wanted, load.train_s
        if load.wanted == targets.most:
            return Decision(load.wanted, f"more workers would help, and {targets.most} are the most allowed", seen)
        needed = math.ceil(load.wanted * (1 - targets.wait) / max(1 - load.wait, 1e-9))
        wanted = min(max(needed, load.wanted + 1), 2 * load.wanted, targets.most)
        return Decision(wanted, "the learner starves", seen)

    def _idle(self, load: Load) -> Decision:
        seen = _seen(load)
        share = min(load.busy / ((1 + self.targets.busy) / 2), 1.0)
        floor = max(self.targets.least, self.starved_at + 1, math.ceil(load.wanted / 2))
        wanted = max(min(math.ceil(load.wanted * share), load.wanted - 1), floor)
        if wanted >= load.wanted:
            below = f"the learner starved with {self.starved_at}" if self.starved_at else "that is the least"
            return Decision(load.wanted, f"fewer workers would do, but {below}", seen)
        return Decision(wanted, "workers generate more than is trained", seen)

    def _forget_other_pace(self, load: Load) -> None:
        paces = sorted((load.train_s, self.starved_pace_s))
        if self.starved_at and paces[0] * OTHER_PACE < paces[1]:
            self.starved_at = 0


def steps_made(status: RunStatus) -> int:
    """Returns the number of steps that the run has made."""
    return status.last_step.step + 1 if status.last_step is not None else 0


def busy_share(workers: Sequence[WorkerInfo]) -> float:
    """Returns the share of the engines' places that is in use at this moment."""
    capacity = sum(worker.capacity for worker in workers)
    # A worker also holds samples that are scored, or wait for a place.
    return sum(min(worker.active, worker.capacity) for worker in workers) / capacity if capacity else 0.0


def _mean_lag(steps: Sequence[StepMetrics]) -> float:
    return sum(step.lag_mean for step in steps) / len(steps) if steps else 0.0


def _age(ages: QueueAges, steps: Sequence[StepMetrics], ahead: float) -> float:
    ahead_s = ahead * sum(step.step_s for step in steps) / len(steps) if steps else 0.0
    return (ages.oldest_ready_s or 0.0) / ahead_s if ahead_s else 0.0


def _seen(load: Load) -> str:
    return (
        f"The learner waits {load.wait:.0%} of its time, engines are {load.busy:.0%} busy, lag is {load.lag:.0%} and"
        f" the queue's age {load.age:.0%} of the steps for which samples are begun ahead"
    )
