"""Opens and closes the way to a collector, and starts spans on it: a worker's (trajectory -> turns -> generate, score),
and a learner's (step -> checkpoint, evaluate, take, pack, train, publish), with links to what it trained. The ids of a
root span are a hash of the run and of what the trace is about, so that every process knows them.
"""

import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME, OTEL_SPAN_LINK_COUNT_LIMIT
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, TraceFlags, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import Lease, Trajectory, TrajectoryId, WeightVersion
from headway.rollout_workers.samples.recorder import Recorder

if TYPE_CHECKING:
    from headway.learner.stages.loop import TrainedStep


TRAJECTORY = "trajectory"
"""The name of a trajectory's root span."""
TRACE_BYTES, SPAN_BYTES = 16, 8


class RootIds(NamedTuple):
    """Ids of a trace and of its root span, as integers of 128 and 64 bits."""

    trace: int
    span: int


def ids_of_trajectory(identity: str, tid: TrajectoryId) -> RootIds:
    """Return the ids of the trajectory's root span; `identity` is the run's."""
    return _hashed(f"{identity}/trajectory/{tid}")


def ids_of_step(identity: str, version: WeightVersion) -> RootIds:
    """Return the ids of the root span of the step that trains this version."""
    return _hashed(f"{identity}/step/{version}")


def _hashed(name: str) -> RootIds:
    digest = blake2b(name.encode(), digest_size=TRACE_BYTES + SPAN_BYTES).digest()
    return RootIds(int.from_bytes(digest[:TRACE_BYTES]), int.from_bytes(digest[TRACE_BYTES:]))


CLOSE_S = 5.0
"""Seconds in which a process that ends may send the spans that are left."""
NOISY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the library that would say at every batch that the collector is away."""
log = logging.getLogger(__name__)

Attributes = Mapping[str, AttributeValue]


class Spans:
    """Starts spans. Only one thread at a time may call it."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, ids: "RootIdGenerator") -> None:
        self._provider = provider
        self._tracer = tracer
        self._ids = ids

    def start_root(
        self,
        name: str,
        ids: RootIds,
        attributes: Attributes,
        *,
        links: Sequence[Link] = (),
        start_ns: int | None = None,
    ) -> Span:
        """Start the root span of a trace. Nothing is sent of a span that never ends. `start_ns`: nanoseconds since the
        epoch; None: now."""
        self._ids.root = ids
        try:
            return self._tracer.start_span(
                name, context=Context(), attributes=attributes, links=links, start_time=start_ns
            )
        finally:
            self._ids.root = None

    def start(self, name: str, parent: Span, attributes: Attributes, *, start_ns: int | None = None) -> Span:
        """Start a span below `parent`."""
        return self._tracer.start_span(
            name, context=set_span_in_context(parent, Context()), attributes=attributes, start_time=start_ns
        )

    def link_to(self, name: str, ids: RootIds, attributes: Attributes) -> Link:
        """Return a link to the root span `name` of these ids, which another process makes. It says whether that root
        is sampled, as far as the sampler decides by trace ids."""
        decision = self._provider.sampler.should_sample(Context(), ids.trace, name).decision
        flags = TraceFlags(TraceFlags.SAMPLED if decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)
        return Link(SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags), attributes)


class RootIdGenerator(IdGenerator):
    """The ids of the next root span, and else random ones, which do not come from the process's own generator."""

    def __init__(self) -> None:
        self.root: RootIds | None = None
        self._random = random.SystemRandom()

    def generate_trace_id(self) -> int:
        """Return 128 bits, not all 0."""
        return self.root.trace if self.root else self._random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """Return 64 bits, not all 0."""
        return self.root.span if self.root else self._random.getrandbits(64) or 1


class _FirstErrorLog(logging.Handler):
    """Says the first thing that goes wrong on the way to the collector, and no other."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._is_said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_said:
            self._is_said = True
            log.warning(
                "Traces do not reach %s: %s Those not sent are lost. This is said once, and the run goes on.",
                self._endpoint,
                record.getMessage(),
            )


def make_provider(
    service: str, attributes: Mapping[str, str], *, endpoint: str, protocol: str
) -> TracerProvider | None:
    """Return a provider that sends spans as the environment says; None, after a warning, for an unknown protocol."""
    exporter = _exporter(protocol)
    _give_exporters_a_generator()
    if exporter is None:
        log.warning("No traces are sent to %s: the protocol %r is neither http/protobuf nor grpc.", endpoint, protocol)
        return None
    first_error = _FirstErrorLog(endpoint)
    for name in NOISY:
        logging.getLogger(name).propagate = False
        logging.getLogger(name).handlers = [first_error]
    # A step trains more trajectories than the 128 links that a span has by default.
    links = None if os.environ.get(OTEL_SPAN_LINK_COUNT_LIMIT) else SpanLimits.UNSET
    named = {} if os.environ.get(OTEL_SERVICE_NAME) else {SERVICE_NAME: service}
    provider = TracerProvider(
        resource=Resource.create({**named, **attributes}),
        id_generator=RootIdGenerator(),
        span_limits=SpanLimits(max_links=links),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_spans(provider: TracerProvider) -> Spans:
    """Return what starts spans of a provider that `make_provider` made."""
    assert isinstance(provider.id_generator, RootIdGenerator)
    return Spans(provider, provider.get_tracer("headway"), provider.id_generator)


def close_provider(provider: TracerProvider) -> None:
    """Send the spans that are left, for `CLOSE_S` at most; a collector that does not answer costs no more."""
    closing = Thread(target=provider.shutdown, name="last spans", daemon=True)
    closing.start()
    closing.join(CLOSE_S)


def _give_exporters_a_generator() -> None:
    """Give the exporters' modules a generator of their own, from which they draw at every batch, in a thread. The state
    of the process's generator belongs to the user's loss, and a resumed or replayed run depends on it."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith("opentelemetry.exporter.") and getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[attr-defined]


def _exporter(protocol: str) -> SpanExporter | None:
    match protocol:
        case "" | "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            return OverHttp()
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            return OverGrpc()
        case _:
            return None


class SampleTraces:
    """Follows the samples of one worker: a `rollout_workers.samples.episode.SampleTracer`."""

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
