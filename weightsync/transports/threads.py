"""Blocking calls in daemon threads. Neither coroutines, nor other threads, nor the interpreter at its end wait for them
beyond their time; the interpreter would wait for the threads of a ThreadPoolExecutor.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline

from .base import UnreachableError
from .rendezvous import BrokerCall

T = TypeVar("T")
_JOIN_S = 1.0
_POLL_S = 0.2
_STANDS_STILL_S = 60.0
"""Longer than the broker lets any call wait."""


@dataclass(frozen=True)
class _Running:
    thread: threading.Thread
    cancelled: threading.Event
    ended: concurrent.futures.Future[None]
    """Ends with the call. It holds no result: an error's traceback would keep all that the call has used."""


class BoundedThreads:
    """Runs blocking calls of coroutines, each in a thread of its own: a frozen learner's host can hold a thread in a
    system call for longer than any caller waits."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    async def run(self, name: str, work: Callable[[], T], cancelled: threading.Event, overdue_s: float | None) -> T:
        """Return the result of `work`, or raise its error, or WeightSyncError once it is overdue. Sets `cancelled` when
        the caller stops waiting."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from here on only the thread can end the future
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        ended.set_running_or_notify_cancel()
        thread = threading.Thread(target=_complete, args=(future, ended, work), name=f"weights-{name}", daemon=True)
        self._running = [other for other in self._running if other.thread.is_alive()]
        self._running.append(_Running(thread, cancelled, ended))
        thread.start()
        try:
            async with asyncio.timeout(overdue_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise WeightSyncError(f"{name}: no answer within {overdue_s:g} s; its thread is left") from error
        finally:
            cancelled.set()
            del future  # an error's traceback holds this frame, and all that the call has used

    @property
    def are_idle(self) -> bool:
        """Whether no call runs, not even one that no caller waits for."""
        return all(entry.ended.done() for entry in self._running)

    async def stop(self, timeout_s: float) -> None:
        """Cancel all calls, and join the threads that end in time."""
        running = [entry for entry in self._running if entry.thread.is_alive()]
        for entry in running:
            entry.cancelled.set()
        if running:
            await asyncio.wait([asyncio.wrap_future(entry.ended) for entry in running], timeout=timeout_s)
        for entry in running:
            if entry.ended.done():
                entry.thread.join(_JOIN_S)
        self._running = [entry for entry in self._running if entry.thread.is_alive()]


def for_threads(loop: asyncio.AbstractEventLoop) -> BrokerCall:
    """Return a function that runs coroutines in `loop` for threads. It raises WeightSyncError where the loop stands
    still or has ended."""

    def call(coroutine: Coroutine[Any, Any, T], /) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:  # the loop is closed
            coroutine.close()
            raise WeightSyncError(f"this worker has ended: {error}") from error
        try:
            return future.result(_STANDS_STILL_S)
        except TimeoutError as error:
            future.cancel()
            raise WeightSyncError(f"this worker's event loop stood still for {_STANDS_STILL_S:g} s") from error

    return call


class DaemonPool:
    """A fixed number of threads for calls, which start in the order in which they were submitted."""

    def __init__(self, name: str, count: int) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"weights-{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Return a future of `work`'s result or error."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, work))
        return future

    def close(self) -> None:
        """Let the threads end after all submitted calls. Does not wait for them."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                    future.set_exception(error)


def in_time(future: concurrent.futures.Future[T], timeout_s: float, deadline: Deadline, what: str) -> T:
    """Return the future's result or raise its error. Raises UnreachableError after `timeout_s`, and WeightSyncError
    once the deadline is over, both with `what` in the message."""
    patience = Deadline(timeout_s)
    try:
        while not concurrent.futures.wait([future], min(_POLL_S, patience.remaining())).done:
            deadline.check(what)
            if patience.is_over():
                raise UnreachableError(f"{what}: nothing came for {timeout_s:g} s")
        return future.result()
    finally:
        future.cancel()


def _complete(
    future: concurrent.futures.Future[T], ended: concurrent.futures.Future[None], work: Callable[[], T]
) -> None:
    try:
        result = work()
    except WeightSyncError as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(error)
        raise  # a bug: its traceback must be seen even if no caller waits for the result
    else:
        future.set_result(result)
    finally:
        del future, work  # as in `run`
        ended.set_result(None)


def all_of(name: str, count: int, calls: Iterable[Callable[[], T]], deadline: Deadline) -> list[T]:
    """Return the results of `calls`, which run in `count` threads, in order. The first error cancels the deadline and
    is raised once no call runs any more."""
    threads = DaemonPool(name, count)
    running = [threads.submit(call) for call in calls]
    threads.close()
    done, rest = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
    failures = [error for ended in done if (error := ended.exception()) is not None]
    if failures:
        deadline.cancel()  # for what the other calls would do there is no more use
        for call in rest:
            call.cancel()
        concurrent.futures.wait(rest)
        try:
            raise failures[0]
        finally:
            del failures, done, rest, running  # an error's traceback holds this frame, and all that the calls have used
    return [ended.result() for ended in running]
