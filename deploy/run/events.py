"""The events of a run that metric sinks are given. The first rank of the learner, or of a stage without workers, makes
each event once. The page of a run also shows incidents between steps: learners that restarted, skipped updates."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import (
    PoolInfo,
    QueueAges,
    QueueDepths,
    RunStatus,
    ScorerInfo,
    ScoringQueue,
    Tallies,
    VersionGroups,
    WorkerInfo,
)
from headway.broker.schema.step_metrics import StepMetrics


class StepEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step was trained, and its weights are on their way."""

    metrics: StepMetrics
    """The fields of a line of metrics.jsonl."""
    tids: tuple[str, ...]
    """The trajectories that it trained, as `group:round:sample`."""

    @property
    def oldest_step(self) -> int:
        """The step of the oldest weights that sampled a token trained here."""
        return self.metrics.step - self.metrics.lag_max


class EvaluationEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pass rate on held-out prompts with the weights of `incarnation` and `step`, those before that step was trained;
    also a line of evaluations.jsonl. None: an older version of Headway measured no more than the pass rate."""

    incarnation: int
    """The incarnation of the learner that published the weights."""
    step: int
    """The steps that had trained them."""
    pass_rate: float
    """The share of samples that passed (pass@1)."""
    pass_at_k: float | None = None
    """The share of prompts of which at least one sample passed (pass@k)."""
    samples: int | None = None
    """The samples of each prompt: k."""
    prompts: int | None = None
    """The held-out prompts."""
    reward_mean: float | None = None
    """The mean reward of the samples."""
    response_tokens_mean: float | None = None
    """The mean number of sampled tokens."""
    reward: dict[str, float] = {}
    """The mean of each reward function's own score and of every further measure, as in a step's metrics."""
    known_at_step: int | None = None
    """The step of the weights that the learner had when all samples were in: workers evaluate beside training."""


class HeartbeatEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of workers and the queues, as the learner saw them after `step`, or before its first one."""

    incarnation: int
    """The incarnation of the learner."""
    step: int
    """The step that it trained last, or its first one before that."""
    time_s: float
    """Seconds since this learner began its loop."""
    workers: tuple[WorkerInfo, ...]
    """The last heartbeat of each living worker."""
    queues: QueueDepths
    """Counts of the groups and samples that wait, are generated, ready or taken."""
    ages: QueueAges = QueueAges()
    tallies: Tallies = Tallies()
    announced: WeightVersion | None = None
    """The version that workers are to hold."""
    versions: tuple[VersionGroups, ...] = ()
    """Groups by weight version, the newest first."""
    pools: tuple[PoolInfo, ...] = ()
    """The pools whose supervisors are alive."""
    scorers: tuple[ScorerInfo, ...] = ()
    """The scorer processes that are alive."""
    scoring: tuple[ScoringQueue, ...] = ()
    """The requests of each scorer."""
    late_workers: int = 0
    """Living workers that missed heartbeats: they are dead, stand still or are cut off."""
    quarantined_workers: int = 0
    """Worker processes that get no more leases."""

    @classmethod
    def of(cls, status: RunStatus, metrics: StepMetrics) -> "HeartbeatEvent":
        """Return the event of the look at the run that followed the step of `metrics`."""
        return cls.later(status, step=metrics.step, time_s=metrics.time_s)

    @classmethod
    def later(cls, status: RunStatus, *, step: int, time_s: float) -> "HeartbeatEvent":
        """Return the event of a look at any time after `step`."""
        return cls(
            incarnation=status.incarnation,
            step=step,
            time_s=time_s,
            workers=status.workers,
            queues=status.queues,
            ages=status.ages,
            tallies=status.tallies,
            announced=status.announced,
            versions=status.versions,
            pools=status.pools,
            scorers=status.scorers,
            scoring=status.scoring,
            late_workers=sum(silence.is_late or silence.has_ended for silence in status.silences.values()),
            quarantined_workers=len(status.quarantined),
        )


class StageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a stage without workers; also a line of the stage's record. A stage that goes on after it was killed
    gives the steps since its checkpoint again."""

    steps: int
    """The number of steps of the stage so far, this one included."""
    part: str
    """The part of the stage, such as `warm-up 1/2`."""
    loss: float | None
    """None: it was not finite."""
    pass_rate: float | None = None
    """The pass rate on held-out prompts as it was measured last."""
    metrics: Mapping[str, float | None] = {}
    """Further metrics of the step, and of held-out records as they were measured last (`held_out/...`)."""


Event = StepEvent | EvaluationEvent | HeartbeatEvent | StageEvent
"""A sink gets these events."""


class RunIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run, at the step before which it happened."""

    step: int
    incarnation: int
    kind: Literal["start", "restart", "branch", "skipped update"]
    text: str


def run_incidents(steps: Sequence[StepMetrics]) -> list[RunIncident]:
    """Return what happened, in the order in which it did; `steps` are all lines of metrics.jsonl."""
    ordered = sorted(steps, key=lambda step: step.incarnation)  # stable: within an incarnation as they were written
    found, last_step, incarnation = [], -1, None
    for step in ordered:
        if step.incarnation != incarnation:
            found.append(_beginning(step, last_step))
            incarnation = step.incarnation
        last_step = step.step
        found.extend(_skipped(step))
    return found


def _beginning(first: StepMetrics, last_step: int) -> RunIncident:
    """Return how a learner began whose first step is `first`, after one whose last step was `last_step` (-1: none)."""
    learner, abandoned = f"Learner {first.incarnation}", last_step + 1 - first.step
    at = {"step": first.step, "incarnation": first.incarnation}
    if last_step < 0:
        return RunIncident(kind="start", text=f"{learner} began at step {first.step}.", **at)
    if abandoned <= 0:
        return RunIncident(kind="restart", text=f"{learner} went on at step {first.step}; no step was lost.", **at)
    steps = f"step {first.step}" if abandoned == 1 else f"steps {first.step} to {last_step}"
    return RunIncident(kind="branch", text=f"{learner} went back to step {first.step} and trained {steps} anew.", **at)


def _skipped(step: StepMetrics) -> Iterator[RunIncident]:
    if step.grad_norm is None:
        text = "The gradient was not finite, so the update was skipped."
        yield RunIncident(step=step.step, incarnation=step.incarnation, kind="skipped update", text=text)
