"""Blocking calls for coroutines: a thread each, told to stop, waited for, and never beyond its time."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.errors import WeightSyncError

T = TypeVar("T")
_JOIN_S = 1.0


@dataclass(frozen=True)
class _Running:
    thread: threading.Thread
    cancelled: threading.Event
    future: concurrent.futures.Future[Any]


class BoundedThreads:
    """Daemon threads: a frozen learner's host can hold one in a system call for longer than anybody waits."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    async def run(self, name: str, work: Callable[[], T], cancelled: threading.Event, overdue_s: float | None) -> T:
        """`work`'s result or error; WeightSyncError if overdue. Sets `cancelled` once nobody waits."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from now on only the thread itself can end it
        thread = threading.Thread(target=_complete, args=(future, work), name=f"weights-{name}", daemon=True)
        self._running = [other for other in self._running if other.thread.is_alive()]
        self._running.append(_Running(thread, cancelled, future))
        thread.start()
        try:
            async with asyncio.timeout(overdue_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise WeightSyncError(f"{name}: no answer within {overdue_s:g} s; its thread is left") from error
        finally:
            cancelled.set()

    @property
    def are_idle(self) -> bool:
        """Nothing runs, not even what nobody waits for any more."""
        return all(entry.future.done() for entry in self._running)

    async def stop(self, timeout_s: float) -> None:
        """Tell all to stop, and join those that end in time."""
        running = [entry for entry in self._running if entry.thread.is_alive()]
        for entry in running:
            entry.cancelled.set()
        waiters = [asyncio.ensure_future(_ended(entry.future)) for entry in running]
        if waiters:
            await asyncio.wait(waiters, timeout=timeout_s)
        for entry in running:
            if entry.future.done():
                entry.thread.join(_JOIN_S)
        self._running = [entry for entry in self._running if entry.thread.is_alive()]  # nor any result kept


async def _ended(future: concurrent.futures.Future[Any]) -> None:
    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)


def _complete(future: concurrent.futures.Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except WeightSyncError as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(error)
        raise  # a bug: its traceback must be seen even if nobody waits for the result
    else:
        future.set_result(result)
