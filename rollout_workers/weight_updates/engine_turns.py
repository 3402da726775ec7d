"""Gives an engine its device in turns with the learner: the engine sleeps while the learner trains.

    phase generate ──► wake ──► swap (the newest weights) ──► lease, generate
    phase train    ──► hand running samples back, as segments ──► sleep ──► tell the server

The server decides which engines are awake, by the verbs of `broker.client`. While the broker is away nothing changes.

With `SwapTurns` the engines of a pool never all pause together to swap weights. A turn keeps engines busy and protects
no data: a broker that does not answer, or a turn that does not come, delays a swap and never prevents it.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress

from headway.broker import BlockingBroker, Broker
from headway.broker.client.broker import Outages
from headway.broker.client.engine_pauses import OPENING_S, SAY_S, Phases, SwapTurnVerbs
from headway.broker.errors import BrokerError
from headway.rollout_workers.engines.base import Engine

log = logging.getLogger(__name__)


POLL_S = 0.01
"""Seconds between two questions for the phase. A change of phase takes two answers."""
EXIT_NOTICE_S = 5.0
"""Seconds to tell the server that the engine is closed."""


class EngineDeviceLock:
    """The learner's device, on which a worker's engine generates in turns with it. The engine was opened after
    `wait_for_device` returned."""

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        worker: str,
        outages: Outages,
        engine_away: Callable[[], AbstractAsyncContextManager[None]],
        set_aside: Callable[[], Awaitable[None]],
    ) -> None:
        """`engine_away` keeps weights from the engine that sleeps in its block. `set_aside` ends the engine's requests
        so that a worker can continue them later."""
        self._phases = broker.phases
        self._engine = engine
        self._worker = worker
        self._outages = outages
        self._engine_away = engine_away
        self._set_aside = set_aside
        self._may_generate = True
        self._asking = asyncio.Lock()
        self._answered = asyncio.Condition()
        self.is_awake = True
        """Whether the server counts the engine as awake: from before it takes memory until it has freed it."""

    async def follow(self) -> None:
        """Sleep and wake in turns, for ever. Raises WeightSyncError, in an exception group, if the engine cannot."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask())
            while True:
                await self._until(lambda: not self._may_generate)
                async with self._engine_away():
                    await self._set_aside()
                    await self._engine.sleep()
                    await self._tell()
                    await self._until(lambda: self.is_awake)
                    await self._engine.wake()

    async def leave(self) -> None:
        """Tell the server that the engine is closed. If the broker does not answer, the engine counts as awake for a
        while."""
        with suppress(TimeoutError), self._outages:
            async with asyncio.timeout(EXIT_NOTICE_S):
                await self._phases.fell_asleep(self._worker)

    async def _ask(self) -> None:
        """Ask for the phase again and again, which also tells the server that the worker lives.

        A worker that leaves waits for the answer: a question that reached the server after `leave` would say that the
        engine is awake.
        """
        while True:
            async with self._asking:
                question = asyncio.create_task(self._question())
                try:
                    await asyncio.shield(question)
                except asyncio.CancelledError:
                    await asyncio.wait({question})
                    raise
            await asyncio.sleep(POLL_S)

    async def _question(self) -> None:
        with self._outages:
            may = await self._phases.may_generate(self._worker, is_awake=self.is_awake)
            async with self._answered:
                self._may_generate = may
                self.is_awake = self.is_awake or may
                self._answered.notify_all()

    async def _tell(self) -> None:
        """Say that the engine is asleep, after the answer to a running question: that question says that the engine is
        awake."""
        async with self._asking:
            self.is_awake = False
            await self._outages.retry_until_available(lambda: self._phases.fell_asleep(self._worker))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._answered:
            await self._answered.wait_for(is_so)


async def wait_for_device(
    phases: Phases, worker: str, outages: Outages, is_over: Callable[[], Awaitable[bool]]
) -> bool:
    """Wait until the engine may take memory; the worker then counts as awake. Returns False if the run ended first
    (`is_over`)."""
    await outages.retry_until_available(
        lambda: phases.fell_asleep(worker)
    )  # perhaps an earlier worker of this name died awake
    while not await outages.retry_until_available(lambda: phases.may_generate(worker, OPENING_S, is_awake=False)):
        if await outages.retry_until_available(is_over):
            return False
        await asyncio.sleep(POLL_S)
    return True


@contextmanager
def keep_awake(broker: Broker, worker: str) -> Iterator[None]:
    """Keep the worker alive in the server's eyes, from a thread, while starting the engine blocks the event loop."""
    done = threading.Event()
    thread = threading.Thread(target=_say_awake, args=(broker, worker, done), name="awake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say_awake(broker: Broker, worker: str, done: threading.Event) -> None:
    with ExitStack() as closing:
        blocking: BlockingBroker | None = None
        while not done.wait(SAY_S):
            with suppress(BrokerError):
                if blocking is None:
                    blocking = BlockingBroker(broker.url, broker.run, session=broker.session)
                    closing.callback(blocking.close)
                blocking.call(blocking.broker.phases.may_generate(worker, OPENING_S, is_awake=True))


TURN_POLL_S = 0.05
"""Seconds between two requests for a turn."""
LONGEST_TURN_WAIT_S = 300.0
"""Seconds to wait for a turn: many times what a swap takes. An engine that hangs keeps its turn until the deadline of
its call, and the deadlines of all its calls together are much longer than other workers should wait."""
GIVE_BACK_S = 1.0
"""Seconds to give a turn back. If the broker does not answer, the turn ends by itself."""


class SwapTurns:
    """Takes turns for one worker, one at a time."""

    def __init__(self, turns: SwapTurnVerbs, worker: str, outages: Outages, *, share: float, ttl_s: float) -> None:
        """`share`: the part of the pool's workers that may swap at once; with 1 no turns are taken. `ttl_s`: seconds
        after which a turn that is not renewed ends."""
        self._turns = turns
        self._worker = worker
        self._outages = outages
        self._share = share
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def turn(self, is_urgent: Callable[[], bool]) -> AsyncIterator[bool]:
        """Hold a turn and renew it, or go on without one once `is_urgent` returns True. Yields whether the worker had
        to wait."""
        if self._share >= 1:
            yield False
            return
        token = f"{self._worker}:{secrets.token_hex(8)}"
        renewing = asyncio.create_task(self._renew(token))
        try:
            yield await self._wait(token, is_urgent)
        finally:
            renewing.cancel()
            with suppress(TimeoutError), self._outages:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._turns.give_back(token)

    async def _wait(self, token: str, is_urgent: Callable[[], bool]) -> bool:
        """Wait until the worker has a turn, or should swap without one. Returns whether it had to wait."""
        deadline, has_waited = time.monotonic() + LONGEST_TURN_WAIT_S, False
        with self._outages:
            while not await self._turns.take(token, self._share, self._ttl_s):
                has_waited = True
                if is_urgent():
                    break
                if time.monotonic() > deadline:
                    log.warning("no turn within %.0f s: swapping weights while others do", LONGEST_TURN_WAIT_S)
                    break
                await asyncio.sleep(TURN_POLL_S)
        return has_waited

    async def _renew(self, token: str) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            with self._outages:
                await self._turns.renew(token, self._ttl_s)
