"""Blocking calls in daemon threads, never waited for beyond their time: not by coroutines, nor by other threads, nor by
the interpreter at its end, as those of a ThreadPoolExecutor are.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.errors import WeightSyncError
from weightsync.deadline import Deadline

from .base import UnreachableError
from .rendezvous import Call

T = TypeVar("T")
_JOIN_S = 1.0
_LOOK_S = 0.2
_STANDS_STILL_S = 60.0
"""Longer than the broker lets any call wait."""


@dataclass(frozen=True)
class _Running:
    thread: threading.Thread
    cancelled: threading.Event
    ended: concurrent.futures.Future[None]
    """Told apart from the result, which belongs to who asked: an error's traceback holds all that the call did."""


class BoundedThreads:
    """For coroutines, a thread for each call: a frozen learner's host can hold one in a system call for longer than
    anybody waits."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    async def run(self, name: str, work: Callable[[], T], cancelled: threading.Event, overdue_s: float | None) -> T:
        """`work`'s result or error; WeightSyncError if overdue. Sets `cancelled` once nobody waits."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from now on only the thread itself can end it
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
            del future  # an error's traceback holds this frame, and all that the call did

    @property
    def are_idle(self) -> bool:
        """Nothing runs, not even what nobody waits for any more."""
        return all(entry.ended.done() for entry in self._running)

    async def stop(self, timeout_s: float) -> None:
        """Tell all to stop, and join those that end in time."""
        running = [entry for entry in self._running if entry.thread.is_alive()]
        for entry in running:
            entry.cancelled.set()
        if running:
            await asyncio.wait([asyncio.wrap_future(entry.ended) for entry in running], timeout=timeout_s)
        for entry in running:
            if entry.ended.done():
                entry.thread.join(_JOIN_S)
        self._running = [entry for entry in self._running if entry.thread.is_alive()]


def for_threads(loop: asyncio.AbstractEventLoop) -> Call:
    """Carries out coroutines in `loop` for threads. Raises WeightSyncError where it stands still, or has ended."""

    def call(coroutine: Coroutine[Any, Any, T], /) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:  # it is closed
            coroutine.close()
            raise WeightSyncError(f"this worker has ended: {error}") from error
        try:
            return future.result(_STANDS_STILL_S)
        except TimeoutError as error:
            future.cancel()
            raise WeightSyncError(f"this worker's event loop stood still for {_STANDS_STILL_S:g} s") from error

    return call


class DaemonPool:
    """So many threads for calls that are made in the order in which they come."""

    def __init__(self, name: str, count: int) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"weights-{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Its result or error, to come."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, work))
        return future

    def close(self) -> None:
        """The threads end after all that was submitted. Waits for none."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it belongs to who asked
                    future.set_exception(error)


def in_time(future: concurrent.futures.Future[T], timeout_s: float, deadline: Deadline, what: str) -> T:
    """Its result or error. Raises UnreachableError after `timeout_s`, and WeightSyncError once the deadline is over,
    either with `what` it was waited for."""
    patience = Deadline(timeout_s)
    try:
        while not concurrent.futures.wait([future], min(_LOOK_S, patience.remaining())).done:
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
        raise  # a bug: its traceback must be seen even if nobody waits for the result
    else:
        future.set_result(result)
    finally:
        del future, work  # as in `run`
        ended.set_result(None)
