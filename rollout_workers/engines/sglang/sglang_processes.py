"""SGLang's processes, kept apart from the worker's own: SGLang would end every child of this process, and this process.

SGLang's front end takes over SIGTERM, and where one of its processes dies it kills the whole tree. Here its loop runs
as a task of ours, and a task that watches the processes tells the engine that they are gone. It also replaces the log
of this process by its own, which gets that log back.

SGLang's processes end with the worker from their first moment on, and make no file outside of the directory of their
sockets. They ask the kernel to end them together with the process that started them, but only once they have imported
everything. If the worker is killed before, the scheduler fails to report and sends SIGQUIT to the process that is now
its parent, which may be the machine's first, and the detokenizer stays for ever. `ParentBoundFunction` mends that.
"""

import asyncio
import atexit
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import Any

from headway.broker.errors import HeadwayError

WATCH_S = 0.5
"""Seconds between two looks at the processes."""
END_S = 5.0
"""Seconds for the processes to end. Then they are killed."""
LONGEST_DIRECTORY = 64
"""Bytes of a directory in which SGLang's sockets can lie: the path of a socket may have 107."""
SHORT_DIRECTORY = "/tmp"
"""The directory that is taken where TMPDIR is longer."""


@contextmanager
def own_sockets() -> Iterator[tempfile.TemporaryDirectory[str]]:
    """Let SGLang, which is started in this block, make its sockets in a new directory that only this user may enter.

    SGLang makes them wherever Python makes temporary files, leaves them there, and cannot be told another place. With a
    path that is too long it fails. Yields the directory, which outlives the block, but no error in it; then the sockets
    there are closed, too.
    """
    usual = tempfile.gettempdir()
    parent = usual if len(os.fsencode(usual)) <= LONGEST_DIRECTORY else SHORT_DIRECTORY
    directory = tempfile.TemporaryDirectory(prefix="headway-sglang-", dir=parent, ignore_cleanup_errors=True)
    tempfile.tempdir = directory.name
    try:
        yield directory
    except BaseException:
        _close_sockets_in(directory.name)
        directory.cleanup()
        raise
    finally:
        tempfile.tempdir = usual


@contextmanager
def own_log() -> Iterator[None]:
    """Give this process its log back after the block, in which SGLang is started.

    SGLang replaces the handlers of the root logger and raises its level to its own, so that nothing below errors would
    be told any more. After the block its level counts for its own loggers alone.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        logging.getLogger("sglang").setLevel(root.level)
        root.handlers[:] = handlers
        root.setLevel(level)


def _close_sockets_in(directory: str) -> None:
    """Close SGLang's sockets in that directory, which a failed start leaves to the garbage collector. ZeroMQ would wait
    there, for ever, until the processes that are gone have read what was sent to them."""
    if "zmq" not in sys.modules:
        return
    import zmq

    for one in gc.get_objects():
        if not issubclass(type(one), zmq.Socket) or one.closed:  # isinstance would ask proxies of things that are gone
            continue
        with suppress(zmq.ZMQError):  # of a context that has ended; the start's own error matters more
            if directory.encode() in one.getsockopt(zmq.LAST_ENDPOINT):
                one.close(linger=0)


def ignore_signal(number: int, frame: object) -> None:
    """Do nothing on SIGQUIT, which SGLang's processes send when they fail: they are watched."""


def end(processes: set[BaseProcess]) -> None:
    """End them, by force if they take too long."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join(END_S)


def _cache_tokens(sglang: Any) -> int | None:
    """Return what the first scheduler has reported at its start. Its place in the engine differs between releases."""
    result = getattr(sglang, "_scheduler_init_result", None)
    infos = getattr(result, "scheduler_infos", None) or [getattr(sglang, "scheduler_info", None) or {}]
    tokens = infos[0].get("max_total_num_tokens")
    return int(tokens) if tokens else None


class SglangProcesses:
    """An open `sglang.Engine` with the processes that it started. An event loop must be running."""

    def __init__(self, sglang: Any, started: set[BaseProcess], sockets: tempfile.TemporaryDirectory[str]) -> None:
        self.front = sglang.tokenizer_manager
        self.cache_tokens = _cache_tokens(sglang)
        """Tokens that the KV cache holds; None: SGLang does not say."""
        self._sglang = sglang
        self._started = started
        self._sockets = sockets
        atexit.unregister(sglang.shutdown)  # it kills all children of this process
        self._ended: Callable[[HeadwayError], None] = lambda reason: None
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self.front.event_loop = loop  # so that SGLang starts no loop of its own, which would take over SIGTERM
        self._tasks = [loop.create_task(self.front.handle_loop()), loop.create_task(self._watch())]
        if watchdog := getattr(self.front, "_subprocess_watchdog", None):
            watchdog.stop()

    def when_ended(self, ended: Callable[[HeadwayError], None]) -> None:
        """Call `ended` once the processes have died."""
        self._ended = ended

    def abort(self, request_id: str = "") -> None:
        """Demand that SGLang ends one request, or all."""
        if request_id:
            self.front.abort_request(rid=request_id)
        else:
            self.front.abort_request(abort_all=True)

    async def close(self) -> None:
        """End the processes, free what the front end holds, and remove the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(end, self._started)
        self._close_sockets()
        self._sockets.cleanup()

    async def _watch(self) -> None:
        while all(process.is_alive() for process in self._started) and not self._tasks[0].done():  # noqa: ASYNC110
            await asyncio.sleep(WATCH_S)
        codes = {process.name: process.exitcode for process in self._started if not process.is_alive()}
        found = f"exit codes {codes}" if codes else f"its front end stopped: {self._tasks[0].exception()!r}"
        self._ended(HeadwayError(f"SGLang's processes are gone ({found}): see their output, and restart the worker"))

    def _close_sockets(self) -> None:
        for held in (*vars(self.front).values(), *vars(self._sglang).values()):
            if type(held).__module__.startswith("zmq.") and hasattr(held, "setsockopt"):
                held.close(linger=0)


PR_SET_PDEATHSIG = 1
LOADS = "sglang.srt.managers.load_snapshot"
"""SGLang's module by which a scheduler tells its load to those who balance it, in a file of shared memory that it never
removes. A worker asks for no load."""


class ParentBoundFunction:
    """A function of SGLang's that runs in a new process. Python's unpickling of it there binds the process to its
    parent, before it imports SGLang."""

    def __init__(self, module: str, name: str, directory: str = "") -> None:
        """`directory`: that of files which outlive the process; empty: where SGLang makes them."""
        self._path = module, name
        self._directory = directory

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module, name = self._path
        if self._directory and find_spec(LOADS):
            own = os.path.join(self._directory, "loads")
            setattr(importlib.import_module(LOADS), "shm_path_for", lambda _: own)  # noqa: B010 - theirs
        return getattr(importlib.import_module(module), name)(*arguments, **named)

    def __reduce__(self) -> Any:
        """SGLang is started while its sockets' directory is that of temporary files (`own_sockets`)."""
        return bound_to_parent, (*self._path, os.getpid(), tempfile.gettempdir())


PARENT_BOUND = {
    "run_scheduler_process_func": ParentBoundFunction("sglang.srt.managers.scheduler", "run_scheduler_process"),
    "run_detokenizer_process_func": ParentBoundFunction(
        "sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"
    ),
}
"""The attributes of `sglang.Engine` that run in processes of their own."""


def bound_to_parent(module: str, name: str, parent: int, directory: str) -> ParentBoundFunction:
    """Return the function, in a process that ends with its parent from now on; at once if that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    return ParentBoundFunction(module, name, directory)
