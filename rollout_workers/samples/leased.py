"""A leased sample from its lease to its submission: generated, saved in segments, judged, taught, handed in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from headway.broker.client.leases import AppendOutcome, AppendReply, Leases
from headway.broker.schema import Lease, Segment, WeightVersion
from headway.rollout_workers.config import SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.outages import Outages
from headway.rollout_workers.rewards.base import UnscoredError

from .engine_use import EngineUse
from .episode import Episodes, JudgedTurn
from .generation import EngineFailedError, request_of, room
from .held_leases import HeldLeases
from .recorder import Recorder
from .segments import SegmentLog
from .submissions import WorkerSubmissions
from .taught import AskedTeacher
from .tracing import SampleTrace, SampleTracer

log = logging.getLogger(__name__)


class LeasedSamples:
    """Plays every leased sample to its end, in a task of its own."""

    def __init__(
        self,
        leases: Leases,
        held: HeldLeases,
        use: EngineUse,
        episodes: Episodes,
        teacher: AskedTeacher | None,
        submissions: WorkerSubmissions,
        outages: Outages,
        *,
        worker: str,
        lease_ttl_s: float,
        decoding: Decoding,
        sampling: SamplingConfig,
        config: WorkersConfig,
        records_experts: bool,
        tracer: SampleTracer,
        reach: Callable[[WeightVersion | None], Awaitable[WeightVersion]],
        on_change: Callable[[], None],
    ) -> None:
        """`reach` waits until the engine holds verified weights at least as new as a version. `on_change` is called
        when the engine has room again, or a lease is gone."""
        self._leases = leases
        self._held = held
        self._use = use
        self._episodes = episodes
        self._teacher = teacher
        self._submissions = submissions
        self._outages = outages
        self._worker = worker
        self._lease_ttl_s = lease_ttl_s
        self._decoding = decoding
        self._sampling = sampling
        self._config = config
        self._records_experts = records_experts
        self._tracer = tracer
        self._reach = reach
        self._on_change = on_change
        self.resumed_tokens = 0
        """Tokens of segments that other workers generated and this worker continued."""

    def begin(self, lease: Lease, create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Hold the lease, and begin its sample."""
        prompt_length = len(lease.prompt.token_ids) if self._records_experts else None
        recorder = Recorder(lease.segments, prompt_length=prompt_length)
        segments = SegmentLog(lease, recorder, self._append, self._config)
        self._held.hold(lease, segments, create_task(self._sample(lease, recorder, segments)))

    async def _sample(self, lease: Lease, recorder: Recorder, segments: SegmentLog) -> None:
        with self._tracer.sample(lease, recorder) as trace:
            try:
                judged = await self._judged(lease, recorder, segments, trace)
                taught = None if self._teacher is None else await self._teacher.teach(lease.prompt, recorder)
            except EngineFailedError:
                await self._outages.ride_out(lambda: self._held.hand_back(lease))
            except UnscoredError as error:
                self._mark_generated(lease)
                await self._submissions.give_up(lease, str(error))
            else:
                trajectory = recorder.to_trajectory(lease, judged.components, judged.reward, self._worker)
                if taught is not None:
                    trajectory = msgspec.structs.replace(trajectory, **taught._asdict())
                trace.submitted(trajectory, await self._submissions.submit(lease, trajectory))
        self._held.forget(lease)
        self._on_change()

    async def _judged(self, lease: Lease, recorder: Recorder, segments: SegmentLog, trace: SampleTrace) -> JudgedTurn:
        """Generate the sample to its end, and return the judgement of its last turn."""
        async with segments:
            judged = await self._play(lease, recorder, segments, trace)
            self._mark_generated(lease)
        # Tokens of weights that fail their verification later must not reach the learner.
        await self._reach(recorder.newest_version)
        return judged or await self._episodes.judge(lease.prompt, recorder, 0, trace)

    def _mark_generated(self, lease: Lease) -> None:
        """Note that the engine has room already, before this sample is scored and submitted."""
        self._held.mark_generated(lease)
        self._on_change()

    async def _play(
        self, lease: Lease, recorder: Recorder, segments: SegmentLog, trace: SampleTrace
    ) -> JudgedTurn | None:
        if recorder.tokens:
            log.info("%s goes on after %d tokens", lease.tid, len(recorder.tokens))
            self.resumed_tokens += len(recorder.tokens)
            await self._reach(recorder.newest_version)  # within a sample versions never go back
        request = request_of(lease, self._sampling, self._decoding)
        return await self._episodes.play(
            lease.prompt,
            recorder,
            lambda: self._use.generate(request, recorder, segments.note),
            lambda: room(request, recorder, self._use.max_model_len),
            trace,
        )

    async def _append(self, lease: Lease, segment: Segment) -> AppendReply | None:
        """Append a segment. Returns None while the broker is away: generation goes on, and a later segment has the
        tokens."""
        # As for a whole sample: no worker may continue what failing weights sampled.
        await self._reach(segment.spans[-1].version)
        with self._outages:
            reply = await self._leases.append(lease, segment, self._lease_ttl_s)
            if reply.outcome is AppendOutcome.FENCED:
                self._held.lose(lease)
                self._on_change()
            return reply
        return None
