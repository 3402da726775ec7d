"""What happens in a run, as metric sinks are told: each struct is written once, by the learner's first rank."""

import msgspec

from broker.schema import QueueDepths, RunStatus, StepMetrics, WorkerInfo


class StepEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step was trained, and its weights are on their way."""

    metrics: StepMetrics
    tids: tuple[str, ...]
    """Of the trajectories that it trained, as `group:round:sample`."""

    @property
    def oldest_step(self) -> int:
        """The step of the oldest weights that sampled a token trained here."""
        return self.metrics.step - self.metrics.lag_max


class EvaluationEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A pass rate on held-out prompts, measured before `step` was trained; also a line of evaluations.jsonl."""

    incarnation: int
    step: int
    pass_rate: float


class HeartbeatEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of workers and the queues, as the learner saw them after `step`."""

    incarnation: int
    step: int
    time_s: float
    """Since this learner started its loop."""
    workers: tuple[WorkerInfo, ...]
    """What each living worker said with its last heartbeat."""
    queues: QueueDepths

    @classmethod
    def of(cls, status: RunStatus, metrics: StepMetrics) -> "HeartbeatEvent":
        """The look at the run that followed the step of `metrics`."""
        return cls(
            incarnation=metrics.incarnation,
            step=metrics.step,
            time_s=metrics.time_s,
            workers=status.workers,
            queues=status.queues,
        )


Event = StepEvent | EvaluationEvent | HeartbeatEvent
