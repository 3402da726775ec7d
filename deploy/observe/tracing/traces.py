"""A worker's spans (trajectory -> turns -> generate, score), and a learner's (step -> checkpoint, evaluate, take, pack,
train, publish), with links to what it trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Link, Span, Status, StatusCode

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import Lease, Trajectory, TrajectoryId
from headway.rollout_workers.samples.recorder import Recorder

from .provider import TRAJECTORY, Attributes, Spans, ids_of_step, ids_of_trajectory

if TYPE_CHECKING:
    from headway.learner.stages.loop import TrainedStep


class SampleTraces:
    """Follows the samples of one worker: a `rollout_workers.samples.tracing.SampleTracer`."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    @contextmanager
    def sample(self, lease: Lease, recorder: Recorder) -> Iterator["SampleSpans"]:
        """Trace one sample while this worker holds its lease."""
        traced = SampleSpans(self._spans, lease, recorder)
        try:
            yield traced
        finally:
            traced.leave()


class SampleSpans:
    """The trace of one sample. The worker whose submission counts sends the root span, and every worker that held the
    lease sends the turns that it took part in."""

    def __init__(self, spans: Spans, lease: Lease, recorder: Recorder) -> None:
        self._spans = spans
        self._recorder = recorder
        attributes: Attributes = {
            "headway.trajectory": str(lease.tid),
            "headway.group": lease.tid.group,
            "headway.resumed_tokens": len(recorder.tokens),
        }
        self._root = spans.start_root(TRAJECTORY, ids_of_trajectory(lease.identity, lease.tid), attributes)
        self._turn: Span | None = None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Trace a turn that begins, and in it the sampling of its tokens."""
        turn = len(self._recorder.turns) + bool(self._recorder.environment_tokens)
        self._turn = self._spans.start("turn", self._root, {"headway.turn": turn})
        before = sum(self._recorder.loss_mask)
        with self._phase("generate") as span:
            try:
                yield
            finally:
                span.set_attributes(self._generated(before))

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Trace how the turn is scored and answered; then it ends."""
        with self._phase("score"):
            yield
        self.leave()

    def submitted(self, trajectory: Trajectory, outcome: SubmitOutcome) -> None:
        """End the root span, unless the sample is void: then it is another worker's."""
        if outcome is SubmitOutcome.FENCED:
            return
        self._root.set_attributes(
            {
                "headway.reward": trajectory.reward,
                "headway.response_tokens": len(trajectory.response_tokens),
                "headway.finish_reason": trajectory.finish_reason,
                "headway.oldest_version": str(trajectory.spans[0].version),
                "headway.newest_version": str(trajectory.spans[-1].version),
            }
        )
        self._root.end()

    def leave(self) -> None:
        """End the turn, if one is under way."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    @contextmanager
    def _phase(self, name: str) -> Iterator[Span]:
        """A phase that is cut short, such as by a drain or a lost lease, says so and why."""
        span = self._spans.start(name, self._turn or self._root, {})
        try:
            yield span
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()

    def _generated(self, before: int) -> Attributes:
        spans = self._recorder.spans
        newest: Attributes = {"headway.newest_version": str(spans[-1].version)} if spans else {}
        return {"headway.tokens": sum(self._recorder.loss_mask) - before, **newest}


class StepTraces:
    """Makes the spans of a run's steps, each once it is done; `identity` is the run's."""

    def __init__(self, spans: Spans, identity: str) -> None:
        self._spans = spans
        self._identity = identity

    def add(self, step: "TrainedStep") -> None:
        """Make the spans of a step from its laps."""
        tids = [trajectory.tid for trajectory in step.scored.trajectories]
        root = self._spans.start_root(
            "step",
            ids_of_step(self._identity, step.version),
            {
                "headway.step": step.version.step,
                "headway.incarnation": step.version.incarnation,
                "headway.trajectories": len(tids),
            },
            links=[self.link(tid) for tid in tids],
            start_ns=_ns(step.laps[0].start_s),
        )
        for lap in step.laps:
            self._spans.start(lap.phase, root, {}, start_ns=_ns(lap.start_s)).end(_ns(lap.end_s))
        root.end(_ns(step.laps[-1].end_s))

    def link(self, tid: TrajectoryId) -> Link:
        """Return the link to a trajectory's root span."""
        return self._spans.link_to(TRAJECTORY, ids_of_trajectory(self._identity, tid), {"headway.trajectory": str(tid)})


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
