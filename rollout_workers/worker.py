"""The rollout worker: refresh weights -> lease -> generate, score and answer turns -> submit, for many samples at once.

Its tasks share one event loop: the lease loop, one for every sample, heartbeat, confirmations and weights. The
first that fails ends the worker with its error. A broker that is away never does; leases are handed back in any
case.
"""

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack, suppress
from typing import Literal

from broker.client.broker import Broker
from broker.client.leases import AppendOutcome, AppendReply, SubmitOutcome
from broker.schema import Lease, Segment, Trajectory, WorkerInfo
from weightsync.config import WeightsConfig
from weightsync.receive.subscriber import Subscriber

from .config import SamplingConfig, WorkersConfig
from .decoding import Decoding
from .engines.base import Engine, GenerationRequest
from .environments.base import Environment
from .environments.single_turn import SingleTurn
from .outages import Outages
from .rewards.base import Scorer, UnscoredError
from .run_end import RunEnd
from .samples.episode import Episodes, Judged
from .samples.generation import generate, room
from .samples.held_leases import HeldLeases
from .samples.recorder import Recorder
from .samples.segments import SegmentLog
from .samples.stalls import StallWatch
from .samples.throughput import Throughput
from .swaps.colocation import BorrowedDevice
from .swaps.turns import SwapTurns
from .swaps.weights import HeldWeights

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.2
"""Between two requests for leases, after one that was refused."""
CONFIRM_S = 1.0
"""How often a worker asks which of its submissions are durable."""
FAREWELL_S = 5.0
"""What a leaving worker gives each of these: handing back, submitting what is finished, its goodbye."""
MISSED_HEARTBEATS = 5
"""After so many a worker no longer counts as alive, and its turn to swap goes to another one."""
MOST_UNSUBMITTED = 2
"""Leases that a worker holds at most, in multiples of what its engine batches: slow rewards must not pile up."""
log = logging.getLogger(__name__)


class Worker:
    """One engine's worth of samples in flight. `run` closes all that it is given but the broker."""

    def __init__(
        self,
        *,
        broker: Broker,
        engine: Engine,
        subscriber: Subscriber,
        scorer: Scorer,
        environment: Environment | None = None,
        decoding: Decoding,
        sampling: SamplingConfig,
        config: WorkersConfig,
        weights: WeightsConfig,
        lease_ttl_s: float,
        worker: str,
        engine_kind: str,
        records_experts: bool = False,
        is_colocated: bool = False,
    ) -> None:
        """`environment`: what answers turns; by default none does. `records_experts`: trajectories say which experts
        their tokens were given. `is_colocated`: the engine has its device in turns with the learner."""
        self._broker = broker
        self._engine = engine
        self._subscriber = subscriber
        self._decoding = decoding
        self._episodes = Episodes(environment or SingleTurn(), scorer, decoding)
        self._sampling = sampling
        self._config = config
        self._lease_ttl_s = lease_ttl_s
        self._worker = worker
        self._engine_kind = engine_kind
        self._records_experts = records_experts
        self._outages = Outages(broker.url)
        self._alive_s = MISSED_HEARTBEATS * config.heartbeat_s
        self._held = HeldLeases(broker.leases, lease_ttl_s)
        self._wake = asyncio.Event()
        self._weights = HeldWeights(
            engine,
            subscriber,
            self._outages,
            SwapTurns(broker.turns, worker, self._outages, share=weights.swaps_at_once, ttl_s=self._alive_s),
            keep_cache=weights.kv_policy == "keep",
            verify=config.probe_swaps,
            on_swap=self._wake.set,
        )
        self._device: BorrowedDevice | None = None
        if is_colocated:
            self._device = BorrowedDevice(broker, engine, worker, self._outages, self._weights, self._set_aside)
        self._admitting = asyncio.Lock()
        self._generated = Throughput()
        self._requests = 0
        """That the engine has."""
        self._stalls = StallWatch(config.heartbeat_s)
        self._run_end = RunEnd(config.patience_s)
        self._end = ""
        self.outcomes = dict.fromkeys(SubmitOutcome, 0)
        """How submissions ended: a duplicate was accepted before, its reply lost; a fenced one is void."""
        self.resumed_tokens = 0
        """Of segments that this worker went on after: it did not have to generate them."""
        self.unscored = 0
        """Samples that were handed back because no reward could be had for them."""
        self._last_unscored = ""

    async def run(self) -> str:
        """Work until drained ("drained") or the run is over (its state). Raises any part's first error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = [self._beat(), self._confirm(), self._weights.follow()]
                if self._device is not None:
                    parts.append(self._device.follow())
                background = [tasks.create_task(part) for part in parts]
                await self._keep_engine_full(tasks)
                await self._wind_down()
                # Neither waits by itself for a broker that is away, nor for weights that nobody follows any more.
                for task in background:
                    task.cancel()
                self._held.cancel_all()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            await self._leave()
        return self._end

    def request_drain(self) -> None:
        """Hand unfinished samples back, submit the finished ones, return from `run`. Idempotent."""
        self._stop("drained")

    async def _keep_engine_full(self, tasks: asyncio.TaskGroup) -> None:
        """Ask for as many leases as the engine has room for, whenever there is room or something changed."""
        wait_s = SHORTEST_WAIT_S
        while not self._end:
            self._wake.clear()
            async with self._admitting:
                leases = await self._lease()
                for lease in leases:
                    self._begin(lease, tasks)
            was_woken = await self._wait(None if self._is_full() else wait_s)
            wait_s = SHORTEST_WAIT_S if leases or was_woken else min(2 * wait_s, LONGEST_WAIT_S)

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        prompt_length = len(lease.prompt.token_ids) if self._records_experts else None
        recorder = Recorder(lease.segments, prompt_length=prompt_length)
        segments = SegmentLog(lease, recorder, self._append, self._config)
        self._held.hold(lease, segments, tasks.create_task(self._sample(lease, recorder, segments)))

    async def _sample(self, lease: Lease, recorder: Recorder, segments: SegmentLog) -> None:
        try:
            async with segments:
                judged = await self._play(lease, recorder, segments)
                self._mark_generated(lease)
            # Tokens of weights that then fail their verification must not reach the learner.
            await self._weights.reach(recorder.newest_version)
            judged = judged or await self._episodes.judge(lease.prompt, recorder, 0)
        except UnscoredError as error:
            self._mark_generated(lease)
            await self._give_up(lease, str(error))
        else:
            await self._submit(lease, recorder.to_trajectory(lease, judged.components, judged.reward, self._worker))
        self._held.forget(lease)
        self._wake.set()

    def _mark_generated(self, lease: Lease) -> None:
        """The engine has room from now on, not once this one is scored and submitted."""
        self._held.mark_generated(lease)
        self._wake.set()

    async def _set_aside(self) -> None:
        """All that is being generated goes on later, here or elsewhere. The engine's weights are not usable, so that no
        lease is asked for any more; those that were asked for before have come when this begins."""
        async with self._admitting:
            pass
        await self._outages.ride_out(self._held.hand_back_unfinished)

    async def _lease(self) -> tuple[Lease, ...]:
        room, version = self._room(), self._weights.usable
        if version is None or room <= 0:
            return ()
        with self._outages:
            reply = await self._broker.leases.lease(self._worker, version, room, self._lease_ttl_s)
            self._note_state(reply.state)
            return reply.leases
        return ()

    async def _play(self, lease: Lease, recorder: Recorder, segments: SegmentLog) -> Judged | None:
        if recorder.tokens:
            log.info("%s goes on after %d tokens", lease.tid, len(recorder.tokens))
            self.resumed_tokens += len(recorder.tokens)
            await self._weights.reach(recorder.newest_version)  # versions never go back within a sample
        request = self._request(lease)
        return await self._episodes.play(
            lease.prompt,
            recorder,
            lambda: self._generate(request, recorder, segments),
            lambda: room(request, recorder, self._engine.max_model_len),
        )

    async def _generate(self, request: GenerationRequest, recorder: Recorder, segments: SegmentLog) -> None:
        """One turn."""

        def note(count: int) -> None:
            self._generated.add(count)
            segments.note()

        self._requests += 1
        try:
            await generate(self._engine, request, recorder, note)
        finally:
            self._requests -= 1

    def _request(self, lease: Lease) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{lease.tid}:{lease.token}",
            prompt_tokens=lease.prompt.token_ids,
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            stop_token_ids=list(self._decoding.stop_token_ids),
        )

    async def _append(self, lease: Lease, segment: Segment) -> AppendReply | None:
        """None if the broker is away: generation goes on, and a later segment has it all."""
        # As for a whole sample: what failing weights sampled must not be gone on from.
        await self._weights.reach(segment.spans[-1].version)
        with self._outages:
            reply = await self._broker.leases.append(lease, segment, self._lease_ttl_s)
            if reply.outcome is AppendOutcome.FENCED:
                self._held.lose(lease)
                self._wake.set()
            return reply
        return None

    async def _submit(self, lease: Lease, trajectory: Trajectory) -> None:
        """Repeated until the broker answers: work must not be lost."""
        outcome = await self._outages.ride_out(lambda: self._broker.leases.submit(lease, trajectory))
        self.outcomes[outcome] += 1

    async def _give_up(self, lease: Lease, reason: str) -> None:
        """The sample is generated anew, here or elsewhere: what it says now may be what cannot be scored."""
        self.unscored += 1
        self._last_unscored = f"{self.unscored} samples could not be scored; the last one: {reason}"
        log.warning("%s: %s", lease.tid, reason)
        await self._outages.ride_out(lambda: self._broker.leases.give_up(lease, reason))

    async def _beat(self) -> None:
        """Keep the leases, report, learn whether the run goes on. Raises HeadwayError for an engine that hangs."""
        while True:
            with self._outages:
                await self._held.renew()  # first: a report that the server does not take must cost no lease
                await self._broker.status.heartbeat(self.info(), self._alive_s)
                self._note_state(await self._broker.status.state())
            self._wake.set()
            self._stalls.look(self._requests if self._weights.may_sample else 0, self._generated.total)
            await asyncio.sleep(self._config.heartbeat_s)

    async def _confirm(self) -> None:
        """Have the server make submissions durable, which takes it up to a second: hence not with the heartbeat."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            with self._outages:
                if again := await self._broker.leases.confirm():
                    log.warning("the server had lost %d submissions that it gets again", again)

    def info(self) -> WorkerInfo:
        """What this worker says of itself."""
        version = None if self._weights.is_paused else self._weights.version
        return WorkerInfo(
            worker=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine=self._engine_kind,
            state=self._state(),
            version=version,
            broadcast_epoch=self._subscriber.epoch,
            wants_broadcast=self._subscriber.joins_groups and not self._end,
            capacity=self._engine.capacity,
            active=len(self._held),
            generated_tokens=self._generated.total,
            submitted=self.outcomes[SubmitOutcome.ACCEPTED] + self.outcomes[SubmitOutcome.DUPLICATE],
            tokens_per_s=self._generated.per_second(),
            swaps=self._weights.swaps,
            last_error=self._weights.last_error
            or self._subscriber.last_error
            or self._outages.last_error
            or self._last_unscored,
        )

    def _state(self) -> Literal["starting", "generating", "idle", "paused", "asleep", "draining"]:
        if self._end:
            return "draining"
        if self._weights.is_paused:
            return "paused"
        if self._weights.version is None:
            return "starting"
        if self._device is not None and not self._device.is_awake:
            return "asleep"
        return "generating" if len(self._held) else "idle"

    def _note_state(self, state: str) -> None:
        if self._run_end.is_over(state):
            self._stop(state)

    def _stop(self, reason: str) -> None:
        if not self._end:
            log.info("worker %s ends: %s", self._worker, reason)
            self._end = reason
            self._wake.set()

    def _is_full(self) -> bool:
        """Nothing to ask for until a sample ends or weights arrive."""
        return self._weights.usable is None or self._room() <= 0

    def _room(self) -> int:
        capacity = self._engine.capacity
        return min(capacity - self._held.generating, MOST_UNSUBMITTED * capacity - len(self._held))

    async def _wait(self, timeout_s: float | None) -> bool:
        """True if woken before the time was up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._wake.wait()
        return False

    async def _wind_down(self) -> None:
        with suppress(TimeoutError), self._outages:
            async with asyncio.timeout(FAREWELL_S):
                await self._held.hand_back_unfinished()
        await self._held.wait_submitted(FAREWELL_S)

    async def _leave(self) -> None:
        async with AsyncExitStack() as closing:
            for part in (self._episodes, self._subscriber):
                closing.push_async_callback(part.close)
            if self._device is not None:
                closing.push_async_callback(self._device.leave)
            closing.push_async_callback(self._engine.close)  # first: a colocated learner waits for its memory
            with suppress(TimeoutError), self._outages:
                async with asyncio.timeout(FAREWELL_S):
                    await self._held.hand_back_all()
                    await self._broker.status.leave(self._worker)
                    await self._broker.leases.confirm()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the others."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
