"""Gives an engine its device in turns with the learner: the engine sleeps while the learner trains.

    phase generate ──► wake ──► swap (the newest weights) ──► lease, generate
    phase train    ──► hand running samples back, as segments ──► sleep ──► tell the server

The server decides which engines are awake, by the verbs of `broker.client`. While the broker is away nothing changes.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from headway.broker import BlockingBroker, Broker
from headway.broker.client.engine_pauses import OPENING_S, SAY_S, Phases
from headway.broker.client.outages import Outages
from headway.broker.errors import BrokerError
from headway.rollout_workers.engines.base import Engine

from .engine_weights import EngineWeights

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
        weights: EngineWeights,
        set_aside: Callable[[], Awaitable[None]],
    ) -> None:
        """`set_aside` ends the engine's requests so that a worker can continue them later."""
        self._phases = broker.phases
        self._engine = engine
        self._worker = worker
        self._outages = outages
        self._weights = weights
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
                async with self._weights.engine_away():
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
