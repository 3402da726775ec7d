"""A worker's spans: trajectory -> turns -> generate, score."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span, Status, StatusCode

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import Lease, Trajectory
from headway.rollout_workers.samples.recorder import Recorder

from .ids import TRAJECTORY, ids_of_trajectory
from .provider import Attributes, Spans


class TracedSamples:
    """Follows the samples of one worker: a `rollout_workers.samples.tracing.SampleTracer`."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    @contextmanager
    def sample(self, lease: Lease, recorder: Recorder) -> Iterator["TracedSample"]:
        """Trace one sample while this worker holds its lease."""
        traced = TracedSample(self._spans, lease, recorder)
        try:
            yield traced
        finally:
            traced.leave()


class TracedSample:
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
        turn = len(self._recorder.turns) + bool(self._recorder.heard)
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
