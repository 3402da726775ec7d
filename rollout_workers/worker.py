"""The rollout worker: refresh weights -> lease -> generate, score and answer turns -> submit, for many samples at once.

Its tasks share one event loop: the lease loop, one task for every sample, heartbeat, confirmations and weights.
The first task that fails ends the worker with its error. A broker that is away never ends a worker.
A worker that ends hands its leases back.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Literal

from headway.broker.client.broker import Broker, Outages
from headway.broker.client.leases import SubmitOutcome
from headway.broker.errors import UnhealthyWorkerError
from headway.broker.schema import Lease
from headway.broker.schema.status import WorkerInfo
from headway.weightsync.config import WeightsConfig
from headway.weightsync.subscriber import Subscriber

from .engines.base import Engine
from .evaluation import EvaluationSampler
from .health import EngineHealth, RunEnd, Verdict
from .samples.episode import Player
from .samples.generation import MonitoredEngine
from .samples.leased_samples import ConcurrencyShare, HeldLeases, LeasedSamples, WorkerContext, WorkerSubmissions
from .samples.teacher_client import TeacherClient
from .weight_updates.engine_turns import EngineDeviceLock, SwapTurns
from .weight_updates.engine_weights import EngineWeights

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""Seconds between two requests for leases: the shortest after a success, up to the longest after refusals."""
EXIT_STEP_S = 4.0
"""Seconds that a leaving worker spends at most on each of four steps: handing back samples that it generates,
submitting finished ones, handing back those that are not scored by then, and telling the broker that it leaves."""
MISSED_HEARTBEATS = 5
"""Heartbeats that a worker may miss before it counts as dead and its turn to swap goes to another worker."""
log = logging.getLogger(__name__)


class Worker:
    """Runs one engine on as many samples as it can batch. `run` closes everything that the worker is given, except the
    broker."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        broker: Broker,
        engine: Engine,
        subscriber: Subscriber,
        player: Player,
        teacher: TeacherClient | None = None,
        on_unhealthy: Callable[[], object] = lambda: None,
        exit_step_s: float = EXIT_STEP_S,
    ) -> None:
        """`player` plays samples, of training and of evaluation alike. `teacher` adds its logprobs of the
        tokens to trajectories. `on_unhealthy` is called once, when the worker finds itself unhealthy and begins to
        hand its work back. `exit_step_s` limits each step of leaving (see EXIT_STEP_S)."""
        self._context = context
        self._worker, self._config = context.worker, context.config
        self._broker = broker
        self._engine = engine
        self._subscriber = subscriber
        self._player = player
        self._teacher = teacher
        self._outages = Outages(broker.url)
        self._alive_s = MISSED_HEARTBEATS * self._config.heartbeat_s
        self._held = HeldLeases(broker.leases, context.lease_ttl_s)
        self._wake = asyncio.Event()
        self._submissions = WorkerSubmissions(broker.leases, self._outages)
        self._weights = self._engine_weights(context.weights)
        self._monitored_engine = self._monitor_engine()
        self._device = self._engine_device_lock() if context.is_colocated else None
        self._samples = self._leased_samples()
        self._evaluation_sampler = self._held_out_sampler()
        self._concurrency = ConcurrencyShare(self._worker, engine.capacity, context.under_way)
        self._admitting = asyncio.Lock()
        self._verdict: Verdict | None = None
        self._on_unhealthy = on_unhealthy
        self._exit_step_s = exit_step_s
        self._run_end = RunEnd(self._config.patience_s)
        self._end = ""

    def _engine_weights(self, weights: WeightsConfig) -> EngineWeights:
        """Return the engine's weights, which are swapped when it is this worker's turn."""
        turns = self._broker.swap_turns
        return EngineWeights(
            self._engine,
            self._subscriber,
            self._outages,
            SwapTurns(turns, self._worker, self._outages, share=weights.swaps_at_once, ttl_s=self._alive_s),
            keep_cache=weights.kv_policy == "keep",
            verify=self._config.probe_swaps,
            until_free=self._until_evaluated,
            on_swap=self._note_swap,
        )

    def _monitor_engine(self) -> MonitoredEngine:
        """Return the engine as samples use it: the worker ends once the rules of `health.py` find it unhealthy."""
        config = self._config
        health = EngineHealth(look_s=config.heartbeat_s, stall_s=config.stall_s, errors=config.engine_errors)
        return MonitoredEngine(self._engine, health, lambda: self._weights.may_sample, self._mark_unhealthy)

    def _engine_device_lock(self) -> EngineDeviceLock:
        """Return the lock on the device that the engine shares with the learner."""
        away = self._weights.engine_away
        return EngineDeviceLock(self._broker, self._engine, self._worker, self._outages, away, self._set_aside)

    def _leased_samples(self) -> LeasedSamples:
        """Return the samples that may be trained."""
        return LeasedSamples(
            self._context,
            self._broker.leases,
            self._held,
            self._monitored_engine,
            self._player,
            self._teacher,
            self._submissions,
            self._outages,
            reach=self._weights.reach,
            on_change=self._wake.set,
        )

    def _held_out_sampler(self) -> EvaluationSampler:
        """Return this worker's part of the evaluations that the learner asks for."""
        return EvaluationSampler(
            self._context,
            self._broker.evaluations,
            self._outages,
            self._player,
            self._monitored_engine.generate,
            max_model_len=self._engine.max_model_len,
            on_change=self._wake.set,
        )

    @property
    def outcomes(self) -> dict[SubmitOutcome, int]:
        """Submissions by outcome."""
        return self._submissions.outcomes

    @property
    def unscored(self) -> int:
        """Samples that the worker gave up because no reward function could score them."""
        return self._submissions.unscored

    @property
    def resumed_tokens(self) -> int:
        """Tokens of segments that other workers generated and this worker continued."""
        return self._samples.resumed_tokens

    async def run(self) -> str:
        """Work until the worker is drained (returns "drained") or the run is over (returns its state).

        Raises the first error of any task, and UnhealthyWorkerError once an unhealthy worker has handed its work
        back.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = [self._beat(), self._submissions.confirm(), self._weights.follow()]
                if self._device is not None:
                    parts.append(self._device.follow())
                background = [tasks.create_task(part) for part in parts]
                await self._keep_engine_full(tasks)
                await self._wind_down()
                # No background task ends by itself; a sample might wait for a broker that is away, or for weights.
                for task in background:
                    task.cancel()
                self._held.cancel_all()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            await self._leave()
        if self._verdict is not None:
            raise UnhealthyWorkerError(self._verdict.reason)
        return self._end

    def request_drain(self) -> None:
        """Ask the worker to hand back unfinished samples, submit finished ones and return from `run`. Idempotent."""
        self._stop("drained")

    async def _keep_engine_full(self, tasks: asyncio.TaskGroup) -> None:
        """Lease as many samples as the engine has room for, whenever there is room or something has changed."""
        wait_s, before = SHORTEST_WAIT_S, (0, self._weights.usable)
        while not self._end:
            self._wake.clear()
            now = self._room(), self._weights.usable
            if now != before:  # heartbeats wake this loop, too, and tell nothing new
                wait_s, before = SHORTEST_WAIT_S, now
            async with self._admitting:
                await self._evaluation_sampler.fill(self._room(self._engine.capacity), tasks.create_task)
                leases = await self._lease()
                for lease in leases:
                    self._samples.begin(lease, tasks.create_task)
            await self._wait(None if self._is_full() else wait_s)
            wait_s = SHORTEST_WAIT_S if leases else min(2 * wait_s, LONGEST_WAIT_S)

    def _note_swap(self) -> None:
        """Note that the engine holds another version: it may be evaluated, and more samples may be leased with it."""
        if self._weights.version is not None:
            self._evaluation_sampler.begin(self._weights.version)
        self._wake.set()

    async def _until_evaluated(self) -> bool:
        """Wait before a swap until the engine's version is needed no more. Returns whether it had to wait."""
        return await self._evaluation_sampler.until_over()

    async def _set_aside(self) -> None:
        """Hand back every sample that is being generated; this worker or another one continues it later. The engine's
        weights are not usable now, so the worker asks for no more leases. The lock waits for leases that it had asked
        for before."""
        async with self._admitting:
            pass
        await self._outages.retry_until_available(self._held.hand_back_unfinished)

    async def _lease(self) -> tuple[Lease, ...]:
        room, version = self._room(), self._weights.usable
        if version is None or room <= 0:
            return ()
        with self._outages:
            reply = await self._broker.leases.lease(self._worker, version, room, self._context.lease_ttl_s)
            self._note_state(reply.state)
            return reply.leases
        return ()

    async def _beat(self) -> None:
        """Renew the leases, report, and learn whether the run goes on. Raises HeadwayError if the engine hangs."""
        while True:
            with self._outages:
                heard = await self._held.report(self._broker.status, self.info(), self._alive_s)
                self._concurrency.note_workers(heard.serving)
                if heard.must_drain:
                    self.request_drain()
                self._note_state(heard.state)
            self._wake.set()
            self._monitored_engine.check_health()
            await asyncio.sleep(self._config.heartbeat_s)

    def info(self) -> WorkerInfo:
        """Return what this worker reports of itself. Any thread may ask."""
        version = None if self._weights.is_paused else self._weights.version
        generated = self._monitored_engine.generated
        return WorkerInfo(
            worker=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine=self._context.engine_kind,
            state=self._state(),
            version=version,
            broadcast_epoch=self._subscriber.epoch,
            wants_broadcast=self._subscriber.joins_groups and not self._end,
            capacity=self._engine.capacity,
            active=len(self._held) + len(self._evaluation_sampler),
            generated_tokens=generated.total,
            submitted=self._submissions.taken,
            tokens_per_s=generated.per_second(),
            swaps=self._weights.swaps,
            last_error=self._weights.last_error
            or self._subscriber.last_error
            or self._outages.last_error
            or self._submissions.last_error
            or self._monitored_engine.last_error,
            silent_s=self._monitored_engine.silent_s,
            busy_s=generated.busy_s,
            slot_s=generated.slot_s,
            broker_calls=self._broker.answered,
            broker_s=self._broker.answer_s,
            swap_s=self._weights.swap_s,
            paused_s=self._weights.paused_s,
            agent=self._player.agent,
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
        return "generating" if len(self._held) + len(self._evaluation_sampler) else "idle"

    def _note_state(self, state: str) -> None:
        if self._run_end.is_over(state):
            self._stop(state)

    def _stop(self, reason: str) -> None:
        if not self._end:
            log.info("worker %s ends: %s", self._worker, reason)
            self._end = reason
            self._wake.set()

    def _mark_unhealthy(self, verdict: Verdict | None) -> None:
        """Begin to hand the work back, if there is a verdict and it is the first one."""
        if verdict is None or self._verdict is not None:
            return
        self._verdict = verdict
        log.error("worker %s is unhealthy: %s", self._worker, verdict.reason)
        self._on_unhealthy()
        self._stop("unhealthy")

    def _is_full(self) -> bool:
        """Whether the worker has nothing to lease until a sample ends or weights arrive."""
        return self._weights.usable is None or self._room() <= 0

    def _room(self, places: int | None = None) -> int:
        """Return how many samples more the worker may begin if it takes so many at a time; by default its own."""
        places = self._concurrency.limit if places is None else places
        busy = len(self._evaluation_sampler) + self._held.generating - self._player.waiting_for_tools
        return min(places - busy, self._player.most_at_once * places - len(self._held))

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait for a wake-up, for `timeout_s` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _wind_down(self) -> None:
        if self._verdict is not None:
            await self._broker.faults.report(
                worker=self._worker, host=socket.gethostname(), rule=self._verdict.rule, reason=self._verdict.reason
            )
        with suppress(TimeoutError), self._outages:
            async with asyncio.timeout(self._exit_step_s):
                await self._evaluation_sampler.end()
                await self._held.hand_back_unfinished()
        await self._held.wait_submitted(self._exit_step_s)
        with suppress(TimeoutError), self._outages:
            async with asyncio.timeout(self._exit_step_s):
                await self._held.hand_back_unsubmitted()

    async def _leave(self) -> None:
        async with AsyncExitStack() as closing:
            for part in (self._player, self._teacher, self._subscriber):
                if part is not None:
                    closing.push_async_callback(part.close)
            if self._device is not None:
                closing.push_async_callback(self._device.leave)
            closing.push_async_callback(self._engine.close)  # closed first: a colocated learner waits for its memory
            with suppress(TimeoutError), self._outages:
                async with asyncio.timeout(self._exit_step_s):
                    await self._held.hand_back_all()
                    await self._broker.status.leave(self._worker)
                    await self._broker.leases.confirm()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended the other tasks."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
