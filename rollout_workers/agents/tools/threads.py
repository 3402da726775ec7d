"""A thread for one episode's plain functions, which may hang."""

import asyncio
import ctypes
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from headway.broker.errors import CallDeadlineError

FREE_S = 10.0
"""What an episode held may take so long to be freed, before its thread is interrupted, and again after it."""

INTERRUPT_POLLS = 10
"""A function that is interrupted is waited for so many hundredths of a second."""


class ExitedError(Exception):
    """A function has called sys.exit, or raised another error that would end the event loop."""


class _DeadlineError(BaseException):
    """Is raised inside of a function that runs past its deadline, between two of its steps."""


class _Job:
    """One call, as its thread runs it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.has_ended = Event()

    def run(self) -> None:
        """Call the function, and hand on what it returns or raises."""
        if self.result.cancelled():  # its caller waited no longer than until its deadline
            return self.has_ended.set()
        value: Any = None
        raised: Exception | None = None
        try:
            value = self._function()
        except _DeadlineError:
            raised = CallDeadlineError("was interrupted at its deadline")
        except BaseException as error:  # noqa: BLE001 - it is handed on
            raised = _told(error)
        finally:
            self.has_ended.set()
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, value, raised)

    def _tell(self, value: Any, raised: Exception | None) -> None:
        if self.result.done():
            return
        if raised is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(raised)


def error_text(error: BaseException) -> str:
    """Return an error's type and what it says; the type alone where it says nothing, or fails to."""
    said = ""
    with suppress(Exception, SystemExit, KeyboardInterrupt):  # of its own method
        said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _told(error: BaseException) -> Exception:
    """Return an error as whoever waits for it may raise it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no future takes
        return error
    told = error_text(error)
    is_exit = type(error) is SystemExit
    return ExitedError(f"called sys.exit({told.partition(': ')[2]})" if is_exit else f"raised {told}")


async def _survived(work: Awaitable[Any]) -> Any:
    """Await a function's own work, whose error ends neither the event loop nor, where nobody cancels it, the task."""
    try:
        return await work
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        raise _told(error) from error


class _Worker:
    """A thread and its queue."""

    def __init__(self) -> None:
        self._jobs = SimpleQueue[_Job | None]()
        self._thread = Thread(target=self._serve, name="episode", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            with suppress(_DeadlineError):
                job = self._jobs.get()
                if job is None:
                    return
                job.run()

    def put(self, job: _Job | None) -> None:
        """Run a job after those before it; None ends the thread."""
        self._jobs.put(job)

    def interrupt(self) -> None:
        """Raise _DeadlineError in the thread. It has no effect while the thread is in a system call or in C."""
        if self._thread.ident is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(_DeadlineError)
            )


class EpisodeThread:
    """Calls an episode's functions, one after another: plain ones in one thread, since what they share may be bound to
    its thread, such as a connection of sqlite3; coroutine functions in the event loop.

    A function that runs past its deadline is interrupted, as far as Python can. If it still runs at the next call, it
    keeps its thread, and another one begins."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._last: _Job | None = None

    async def call(self, function: Callable[..., Any], *arguments: Any, deadline_s: float, **named: Any) -> Any:
        """Return what the function returns, awaited if need be. Raises what it raises, CallDeadlineError past the
        deadline."""
        try:
            async with asyncio.timeout(deadline_s) as limit:
                if inspect.iscoroutinefunction(function):
                    return await _survived(function(*arguments, **named))
                result = await self._in_thread(lambda: function(*arguments, **named))
                return await _survived(result) if inspect.isawaitable(result) else result
        except TimeoutError:
            if not limit.expired():
                raise
            await self._interrupt()
            raise CallDeadlineError(f"ran past its deadline of {deadline_s:g} s") from None

    async def close(self, own: object = None) -> None:
        """Call the `close` of an object, if it has one, after whatever still runs, and end the thread. What that raises
        is passed over: the episode has its outcome. A cancelled caller waits for it all the same."""
        await uncancelled(self._close(getattr(own, "close", None)))

    async def _close(self, closing: Any) -> None:
        if callable(closing):
            with suppress(Exception, SystemExit):
                try:
                    await self.call(closing, deadline_s=FREE_S)
                except CallDeadlineError:
                    if self._worker is None:  # its thread was left to what hangs
                        await self.call(closing, deadline_s=FREE_S)
        if self._worker is not None:
            if self._last is not None and not self._last.has_ended.is_set():
                self._worker.interrupt()
            self._worker.put(None)
            self._worker = None

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        job = self._last = _Job(function)
        self._running_worker().put(job)
        return await job.result

    def _running_worker(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker()
        return self._worker

    async def _interrupt(self) -> None:
        """Interrupt what runs in the thread, and leave the thread to it if that has no effect."""
        if self._worker is None or self._last is None or self._last.has_ended.is_set():
            return
        self._worker.interrupt()
        for _ in range(INTERRUPT_POLLS):
            if self._last.has_ended.is_set():
                return
            await asyncio.sleep(0.01)
        self._worker.put(None)
        self._worker = None


@asynccontextmanager
async def made_in_thread(
    make: Callable[..., Any], deadline_s: float, arguments: Mapping[str, Any]
) -> AsyncIterator[tuple[Any, EpisodeThread]]:
    """Yield an object of the user's own, and the thread in which it is made and, at the end, closed."""
    thread, own = EpisodeThread(), None
    try:
        own = await thread.call(make, deadline_s=deadline_s, **arguments)
        yield own, thread
    finally:
        await thread.close(own)


async def uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await the work to its end, and only then be cancelled."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
