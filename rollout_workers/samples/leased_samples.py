"""Leased samples from their lease to their submission: generated, saved in segments, scored, submitted.

`LeasedSamples` plays each sample in a task of its own. `HeldLeases` renews the leases meanwhile, drops lost ones and
hands the rest back at the end. `WorkerSubmissions` hands finished samples in, and has the server make them durable.
`ConcurrencyShare` says how many samples a worker takes at a time where the recipe has no number
(`engine.max_concurrent`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headway.broker.client.broker import Outages
from headway.broker.client.leases import AppendOutcome, AppendReply, Leases, SubmitOutcome
from headway.broker.client.status import HeartbeatReply, StatusVerbs
from headway.broker.schema import Lease, Segment, Trajectory, WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.rollout_workers.config import EvalConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.rewards.base import UnscoredError
from headway.weightsync.config import WeightsConfig

from .episode import NO_TRACER, PlayedSample, Player, SampleTrace, SampleTracer, ScoredTurn
from .generation import EngineFailedError, MonitoredEngine, request_of
from .recorder import Recorder, SegmentLog
from .teacher_client import TeacherClient

log = logging.getLogger(__name__)


class _HeldLease(msgspec.Struct, eq=False):
    lease: Lease
    segments: SegmentLog
    task: asyncio.Task[None]
    is_generating: bool = True


class HeldLeases:
    """The leases by token: a worker may lease a lost sample again while the sample's old task still ends."""

    def __init__(self, leases: Leases, ttl_s: float) -> None:
        self._leases = leases
        self._ttl_s = ttl_s
        self._held: dict[str, _HeldLease] = {}
        self.lost = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generating(self) -> int:
        """Leases whose samples the engine still generates; the others are being scored or submitted."""
        return sum(held.is_generating for held in self._held.values())

    def hold(self, lease: Lease, segments: SegmentLog, task: asyncio.Task[None]) -> None:
        """Add a lease. `task` generates, scores and submits its sample."""
        self._held[lease.token] = _HeldLease(lease, segments, task)

    def mark_generated(self, lease: Lease) -> None:
        """Note that the sample is generated: a drain waits for it from now on instead of cancelling it."""
        if held := self._held.get(lease.token):
            held.is_generating = False

    def forget(self, lease: Lease) -> None:
        """Drop a lease whose submission has ended, whatever its outcome."""
        self._held.pop(lease.token, None)

    def drop_lost(self, lease: Lease) -> None:
        """Stop generating a sample whose lease another worker has. A finished sample learns it when it is submitted."""
        held = self._held.get(lease.token)
        if held is not None and held.is_generating:
            log.info("lease of %s was lost; its generation is cancelled", lease.tid)
            self.lost += 1
            held.task.cancel()
            self.forget(lease)

    async def report(self, status: StatusVerbs, info: WorkerInfo, alive_s: float) -> HeartbeatReply:
        """Report that the worker is alive for `alive_s` and renew all leases, in one call, and stop generating the
        samples of lost ones. Returns the answer."""
        asked = [held.lease for held in self._held.values()]
        heard = await status.heartbeat(info, alive_s, asked, self._ttl_s)
        self._leases.forget_lost(asked, heard.lost)
        for lease in asked:
            if lease.token in heard.lost:
                self.drop_lost(lease)
        return heard

    async def hand_back(self, lease: Lease) -> None:
        """Append the newest tokens of a sample whose generation has ended, and release it, so that a worker can
        continue it."""
        if held := self._held.get(lease.token):
            await held.segments.append_rest()
            await self._release([held])

    async def hand_back_unfinished(self) -> None:
        """Cancel the samples that are being generated, append their newest tokens and release them, so that another
        worker can continue them at once."""
        await self._hand_back([held for held in self._held.values() if held.is_generating])

    async def hand_back_unsubmitted(self) -> None:
        """Do the same with the samples that are generated, and not scored or submitted yet: another worker scores
        them without sampling a token."""
        await self._hand_back(list(self._held.values()))

    async def _hand_back(self, unfinished: list[_HeldLease]) -> None:
        if not unfinished:
            return
        for held in unfinished:
            held.task.cancel()
        await asyncio.wait([held.task for held in unfinished])
        await asyncio.gather(*(held.segments.append_rest() for held in unfinished))
        await self._release(unfinished)

    def cancel_all(self) -> None:
        """Cancel every task, also those that score or submit. The leases stay held."""
        for held in self._held.values():
            held.task.cancel()

    async def hand_back_all(self) -> None:
        """Cancel every task and release every lease."""
        self.cancel_all()
        await self._release(list(self._held.values()))

    async def wait_submitted(self, timeout_s: float) -> None:
        """Wait until every finished sample is submitted, or `timeout_s` seconds have passed."""
        if tasks := [held.task for held in self._held.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _release(self, unfinished: list[_HeldLease]) -> None:
        if not unfinished:
            return
        await self._leases.release([held.lease for held in unfinished])
        for held in unfinished:
            self.forget(held.lease)


CONFIRM_S = 1.0
"""Seconds between two questions for which submissions are durable."""


class WorkerSubmissions:
    """Hands samples in, again and again until the broker answers, so that no work is lost."""

    def __init__(self, leases: Leases, outages: Outages) -> None:
        self._leases = leases
        self._outages = outages
        self.outcomes = dict.fromkeys(SubmitOutcome, 0)
        """Submissions by outcome. A duplicate was accepted before, and its reply was lost; a fenced one is void."""
        self.unscored = 0
        """Samples that the worker gave up because no reward function could score them."""
        self.last_error = ""

    @property
    def taken(self) -> int:
        """Samples that the broker has of this worker."""
        return self.outcomes[SubmitOutcome.ACCEPTED] + self.outcomes[SubmitOutcome.DUPLICATE]

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Submit the sample, and return the broker's answer."""
        outcome = await self._outages.retry_until_available(lambda: self._leases.submit(lease, trajectory))
        self.outcomes[outcome] += 1
        return outcome

    async def give_up(self, lease: Lease, reason: str) -> None:
        """Give the sample up, so that a worker generates it again: its present text may be what the reward function
        cannot score."""
        self.unscored += 1
        self.last_error = f"{self.unscored} samples could not be scored; the last one: {reason}"
        log.warning("%s: %s", lease.tid, reason)
        await self._outages.retry_until_available(lambda: self._leases.give_up(lease, reason))

    async def confirm(self) -> None:
        """Have the server make submissions durable, for ever. That takes up to a second, hence not with the
        heartbeat."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            with self._outages:
                if again := await self._leases.confirm():
                    log.warning("the server had lost %d submissions that it gets again", again)


LEAST_SHARE = 8
"""The least share of a worker: fewer samples would not keep an engine busy while others are scored and leased."""


class ConcurrencyShare:
    """Counts the samples that a worker has its engine generate at a time: all that the engine batches, or this worker's
    share of those that the run may have under way, where that is less.

    Without the share the worker that asks first would lease them all, and an engine that batches much would leave the
    others idle.
    """

    def __init__(self, worker: str, batched: int, under_way: int = 0) -> None:
        """`batched`: requests that the engine can batch. `under_way`: the most samples that the run generates at a
        time; 0: the worker takes as many as its engine batches, whatever others do."""
        self._worker = worker
        self._batched = batched
        self._under_way = under_way
        self.limit = min(batched, under_way) if under_way else batched
        """Samples that the worker takes now."""
        self._is_said = False

    def note_workers(self, serving: int) -> None:
        """Note that so many workers share the run's samples, this one included."""
        if not self._under_way:
            return
        places = min(self._batched, max(-(-self._under_way // max(1, serving)), LEAST_SHARE))
        if places != self.limit or not self._is_said:
            self.limit, self._is_said = places, True
            log.info(
                "worker %s: takes up to %d samples at a time: its engine batches %d, and the run has at most %d under"
                " way; workers that share them: %d",
                self._worker,
                places,
                self._batched,
                self._under_way,
                serving,
            )


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The facts of its run that a worker works by."""

    worker: str
    """The worker's name."""
    engine_kind: str
    lease_ttl_s: float
    decoding: Decoding
    sampling: SamplingConfig
    config: WorkersConfig
    weights: WeightsConfig
    records_experts: bool = False
    """Whether trajectories carry the experts that their tokens were given."""
    is_colocated: bool = False
    """Whether the engine shares its device with the learner, in turns."""
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    """How held-out prompts are sampled; by default the worker samples none."""
    under_way: int = 0
    """See ConcurrencyShare."""
    tracer: SampleTracer = NO_TRACER
    """It follows every sample that may be trained."""


class LeasedSamples:
    """Plays every leased sample to its end, in a task of its own."""

    def __init__(
        self,
        context: WorkerContext,
        leases: Leases,
        held: HeldLeases,
        engine: MonitoredEngine,
        player: Player,
        teacher: TeacherClient | None,
        submissions: WorkerSubmissions,
        outages: Outages,
        *,
        reach: Callable[[WeightVersion | None], Awaitable[WeightVersion]],
        on_change: Callable[[], None],
    ) -> None:
        """`reach` waits until the engine holds verified weights at least as new as a version. `on_change` is called
        when the engine has room again, or a lease is gone."""
        self._context = context
        self._leases = leases
        self._held = held
        self._engine = engine
        self._player = player
        self._teacher = teacher
        self._submissions = submissions
        self._outages = outages
        self._reach = reach
        self._on_change = on_change
        self.resumed_tokens = 0
        """Tokens of segments that other workers generated and this worker continued."""

    def begin(self, lease: Lease, create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Hold the lease, and begin its sample."""
        begins_anew = bool(lease.segments) and not self._player.resumes(lease.segments)
        if begins_anew:
            lease = msgspec.structs.replace(lease, segments=())
        recorder = self._player.recorder(lease.prompt, lease.segments, records_experts=self._context.records_experts)
        recorder.begins_anew = begins_anew
        segments = SegmentLog(lease, recorder, self._append, self._context.config)
        self._held.hold(lease, segments, create_task(self._sample(lease, recorder, segments)))

    async def _sample(self, lease: Lease, recorder: Recorder, segments: SegmentLog) -> None:
        if recorder.begins_anew:
            log.info("%s begins anew: it cannot go on after what was recorded", lease.tid)
            await self._outages.retry_until_available(lambda: self._leases.begin_anew(lease))
        with self._context.tracer.sample(lease, recorder) as trace:
            try:
                scored = await self._scored_turn(lease, recorder, segments, trace)
                from_teacher = None if self._teacher is None else await self._teacher.logprobs(lease.prompt, recorder)
            except EngineFailedError:
                await self._outages.retry_until_available(lambda: self._held.hand_back(lease))
            except UnscoredError as error:
                self._mark_generated(lease)
                await self._submissions.give_up(lease, str(error))
            else:
                trajectory = recorder.to_trajectory(lease, scored.components, scored.reward, self._context.worker)
                if from_teacher is not None:
                    trajectory = msgspec.structs.replace(trajectory, **from_teacher._asdict())
                trace.submitted(trajectory, await self._submissions.submit(lease, trajectory))
        self._held.forget(lease)
        self._on_change()

    async def _scored_turn(
        self, lease: Lease, recorder: Recorder, segments: SegmentLog, trace: SampleTrace
    ) -> ScoredTurn:
        """Generate the sample to its end, and return its scored last turn."""
        async with segments:
            scored = await self._play(lease, recorder, segments, trace)
            self._mark_generated(lease)
        # Tokens of weights that fail their verification later must not reach the learner.
        await self._reach(recorder.newest_version)
        return scored or await self._player.score_turn(lease.prompt, recorder, 0, trace)

    def _mark_generated(self, lease: Lease) -> None:
        """Note that the engine has room already, before this sample is scored and submitted."""
        self._held.mark_generated(lease)
        self._on_change()

    async def _play(
        self, lease: Lease, recorder: Recorder, segments: SegmentLog, trace: SampleTrace
    ) -> ScoredTurn | None:
        if recorder.tokens:
            log.info("%s goes on after %d tokens", lease.tid, len(recorder.tokens))
            self.resumed_tokens += len(recorder.tokens)
            await self._reach(recorder.newest_version)  # within a sample versions never go back
        request = request_of(lease, self._context.sampling, self._context.decoding)
        sample = PlayedSample(
            prompt=lease.prompt,
            number=lease.tid.sample,
            recorder=recorder,
            request=request,
            generate=lambda asked, turn: self._engine.generate(
                asked, turn, segments.note if turn is recorder else None
            ),
            max_model_len=self._engine.max_model_len,
            keep=segments.keep_all,
            intend=partial(self._intend, lease),
        )
        return await self._player.play(sample, trace)

    async def _intend(self, lease: Lease, calls: Sequence[str]) -> Sequence[str] | None:
        """Record the calls that run, however long the broker is away. A lost lease cancels the sample."""
        before = await self._outages.retry_until_available(lambda: self._leases.intend(lease, calls))
        if before is None:
            self._held.drop_lost(lease)
            self._on_change()
        return before

    async def _append(self, lease: Lease, segment: Segment) -> AppendReply | None:
        """Append a segment. Returns None while the broker is away: generation goes on, and a later segment has the
        tokens."""
        # As for a whole sample: no worker may continue what failing weights sampled.
        await self._reach(max(span.version for span in segment.spans))
        with self._outages:
            reply = await self._leases.append(lease, segment, self._context.lease_ttl_s)
            if reply.outcome is AppendOutcome.FENCED:
                self._held.drop_lost(lease)
                self._on_change()
            return reply
        return None
