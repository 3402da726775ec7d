"""The broker as its users see it: `Broker` for coroutines, `BlockingBroker` for the learner's plain code."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from headway.broker.connection.connection import ANSWER_S, Connection, without_password
from headway.broker.errors import BrokerError, FencedError, QuarantinedError
from headway.broker.security.garbage_collection import GarbageCollector

from .engine_pauses import Phases, SwapTurnVerbs
from .evaluations import Evaluations
from .learner import Batches, PromptVerbs
from .leases import Leases
from .scoring import Scoring
from .status import ProgressVerbs, StatusVerbs
from .supervision import Faults, LearnerHeartbeat, Pools, Usage
from .weights import ArchivedBlobs, RendezvousStore, Versions

T = TypeVar("T")

LAST_PATIENCE_S = 5.0
"""A process that ends waits so long for a server that is away: one that is started again answers after a second."""


class Broker:
    """One run on one server. Its parts have the verbs; all of them retry while the server is away."""

    def __init__(self, url: str, run: str, *, timeout_s: float = ANSWER_S, session: str = "") -> None:
        """`session` is that of another broker of the same worker, see the property."""
        self._connection = Connection(url, run, timeout_s, session)
        self.run = run
        self.url = url
        self.prompts = PromptVerbs(self._connection)
        self.leases = Leases(self._connection)
        self.versions = Versions(self._connection)
        self.batches = Batches(self._connection, self.versions)
        self.status = StatusVerbs(self._connection)
        self.archive = ArchivedBlobs(self._connection)
        self.swap_turns = SwapTurnVerbs(self._connection)
        self.phases = Phases(self._connection)
        self.evaluations = Evaluations(self._connection)
        self.scoring = Scoring(self._connection)
        self.pools = Pools(self._connection)
        self.faults = Faults(self._connection)
        self.usage = Usage(self._connection)
        self.progress = ProgressVerbs(self._connection)
        self.heartbeat = LearnerHeartbeat(self._connection)
        self.garbage = GarbageCollector(self._connection)
        self.rendezvous = RendezvousStore(self._connection, timeout_s)

    @property
    def session(self) -> str:
        """A secret by which the server tells this process from others that claim to be the same worker."""
        return self._connection.session

    @property
    def answered(self) -> int:
        """Calls that the server has answered, without those that were sent to make it wait."""
        return self._connection.answered

    @property
    def answer_s(self) -> float:
        """The sum of the times until they were answered; some of them overlap."""
        return self._connection.answer_s

    async def ping(self) -> None:
        """Raises BrokerUnavailableError where the server does not answer."""
        await self._connection.execute("PING")

    async def join(self) -> str:
        """Joins the run that has the name now, and returns its identity, empty where there is none. From then on verbs
        raise ForeignRunError where another run has the name. Every verb joins by itself."""
        return await self._connection.join()

    def end_when(self, is_ending: Callable[[], bool], patience_s: float = LAST_PATIENCE_S) -> None:
        """Says when this process begins to end: from then on all calls together wait `patience_s` for a server that
        does not answer, and later ones ask it only once, until it answers again. Any thread may ask `is_ending`."""
        self._connection.end_when(is_ending, patience_s)

    async def close(self) -> None:
        await self.garbage.end()
        await self.heartbeat.end()
        await self.leases.close()
        await self._connection.close()


async def open_broker(url: str, run: str, *, timeout_s: float = ANSWER_S, session: str = "") -> Broker:
    """Returns a broker that has answered. Raises BrokerUnavailableError, or BrokerError for a bad URL or run name."""
    broker = Broker(url, run, timeout_s=timeout_s, session=session)
    try:
        await broker.ping()
    except BaseException:
        await broker.close()
        raise
    return broker


_CLOSE_S = 2.0
"""Seconds for an event loop to close; one that does not is left behind."""


class BlockingBroker:
    """A broker for code that is not asynchronous: coroutines run on an event loop in a thread of its own."""

    def __init__(self, url: str, run: str, *, timeout_s: float = ANSWER_S, session: str = "") -> None:
        self._url = without_password(url)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._is_open, self._ending = True, threading.Lock()
        self._thread.start()
        try:
            self.broker = self.call(open_broker(url, run, timeout_s=timeout_s, session=session))
        except BaseException:
            self._stop()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`blocking.call(blocking.broker.batches.take(...))`: returns the coroutine's result, or raises
        its error. Any thread may call it. Raises BrokerError where another thread has closed this client meanwhile."""
        with self._ending:
            if not self._is_open:
                coroutine.close()
                raise self._closed()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise self._closed() from error
        except BaseException:
            future.cancel()  # no-op if it is done; else a Ctrl-C here must not leave it running
            raise

    def close(self) -> None:
        """Ends calls that other threads wait for, and closes the connection."""
        if self._is_open:
            self.call(self.broker.close())
            self._stop()

    def _closed(self) -> BrokerError:
        return BrokerError(f"The connection to the broker at {self._url} has been closed: open another one.")

    def _stop(self) -> None:
        with self._ending:
            self._is_open = False
        asyncio.run_coroutine_threadsafe(_end_the_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # With a connection that a cancelled task was about to get, uvloop raises here, or waits for ever.
        closing = threading.Thread(target=self._close_loop, name="broker", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close_loop(self) -> None:
        with suppress(OSError):
            self._loop.close()


async def _end_the_others() -> None:
    """Ends all that runs on this loop: a caller in another thread would wait for ever for what stands still."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


log = logging.getLogger(__name__)


class Outages:
    """Tracks whether the broker answers this process."""

    def __init__(self, url: str, *, shortest_s: float = 0.1, longest_s: float = 2.0) -> None:
        self._url = without_password(url)
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._is_down = False
        self.last_error = ""

    async def retry_until_available(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat the call until the broker answers, and return its result. Only cancelling ends the wait."""
        wait_s = self._shortest_s
        while True:
            with self:
                return await call()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._longest_s)

    def __enter__(self) -> None:
        """Inside `with outages:` an error of an absent broker is swallowed, and the log says when an outage begins and
        ends. An error that no waiting can cure is raised, and ends the worker."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        is_outage = isinstance(error, BrokerError) and not isinstance(error, (FencedError, QuarantinedError))
        if is_outage:
            self._begin(error)
        elif error is None:
            self._end()
        return is_outage

    def _begin(self, error: BaseException | None) -> None:
        self.last_error = str(error)
        if not self._is_down:
            self._is_down = True
            log.warning("broker %s: %s Running samples go on, calls are repeated.", self._url, error)

    def _end(self) -> None:
        if self._is_down:
            self._is_down = False
            self.last_error = ""
            log.warning("broker %s answers again", self._url)
