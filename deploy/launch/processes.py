"""The `local` launcher: each command is a child process with a session of its own, tethered to this process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from headway.learner.checkpoints.disk import gone

from . import tether
from .base import ERROR_PREFIX, Command, Handle, Launcher
from .leftovers import TemporaryFiles

TAIL_BYTES = 64 * 1024
TRACKER = "resource_tracker import main"
"""Words in the arguments of Python's tracker of shared memory. It ends by itself once all whose memory it tracks have
ended, and once it has removed what they left."""
PATIENCE_S = 5.0
"""Seconds in which all end after a kill, trackers last: the end of a process with a GPU takes seconds."""
LOOK_S = 0.02


class LocalLauncher(Launcher):
    """Starts child processes on this machine. The kernel ends them if this process is killed."""

    def start(self, command: Command) -> "Child":
        return Child(command)


class Child(Handle):
    """A child process."""

    def __init__(self, command: Command) -> None:
        super().__init__(command)
        self._until_s: float | None = None
        self._is_patient: Callable[[], bool] = lambda: True
        if command.farewell is not None:
            command.farewell.unlink(missing_ok=True)  # left by the process before
        if command.cwd is not None:
            command.cwd.mkdir(parents=True, exist_ok=True)
        with _open_log(command.log) as log, ExitStack() as until_started:
            self._log_start = 0 if log is None else log.seek(0, os.SEEK_END)
            self._temporary = TemporaryFiles(command.directory()) if command.pool else None
            if self._temporary is not None:
                until_started.callback(self._temporary.remove)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                cwd=command.cwd,
                env={**os.environ, tether.ENVIRONMENT: "1", **self._own_variables(), **command.variables()},
                start_new_session=True,
            )
            until_started.pop_all()

    def _own_variables(self) -> dict[str, str]:
        return {} if self._temporary is None else self._temporary.variables()

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session and process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return its exit code: None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end in an orderly way (SIGTERM). Idempotent."""
        if self.exit_code() is None:
            for pid in self._addressees():
                _signal(pid, signal.SIGTERM)

    def begin_kill(self, *, is_patient: Callable[[], bool] = lambda: True) -> None:
        """Kill it and all that it started but trackers of shared memory. Once `is_patient` returns False these are left
        to end by themselves, as soon as all others have ended."""
        if self._until_s is None:
            self._is_patient = is_patient
            self._until_s = time.monotonic() + PATIENCE_S
        self._process.kill()
        self._strike()

    def kill(self) -> None:
        """End it and all that it started, at once, reap it, and remove what they left. Idempotent."""
        if self._until_s is None:
            self.begin_kill()
        assert self._until_s is not None
        self._process.wait()
        while (are_trackers := self._strike()) and self._is_patient() and time.monotonic() < self._until_s:
            time.sleep(LOOK_S)
        if self._is_patient() or not any(are_trackers):
            with suppress(ProcessLookupError):  # the whole group has ended already
                os.killpg(self.pid, signal.SIGKILL)
        if self._temporary is not None:
            self._temporary.remove()

    def _strike(self) -> list[bool]:
        """Kill the processes of its group but trackers of shared memory, and return, of each that has not ended yet,
        whether it is a tracker."""
        are_trackers = []
        for one in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):  # it has ended just now
                # one that has ended stays until it is waited for, which a container's first process may never do
                if os.getpgid(one.pid) != self.pid or one.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_tracker = TRACKER in " ".join(one.cmdline())
                if not is_tracker:
                    one.kill()
                are_trackers.append(is_tracker)
        return are_trackers

    def log(self) -> str:
        path = self.command.log
        return "" if path is None else self._tail(path)

    def _tail(self, path: Path) -> str:
        try:
            with path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return f"{ERROR_PREFIX}{gone(path.parent)}"
        except OSError as error:
            return f"({path} cannot be read: {error})"

    def _addressees(self) -> list[int]:
        if not self.command.relay:
            return [self.pid]
        try:
            children = [child.pid for child in psutil.Process(self.pid).children()]
        except psutil.NoSuchProcess:
            return []
        return children or [self.pid]


@contextmanager
def guarded(pid: int) -> Iterator[None]:
    """While this block runs, the kernel sends the server process `pid` SIGTERM if this process is killed."""
    guard = subprocess.Popen(
        [sys.executable, "-IS", tether.__file__, "--guard", str(os.getpid()), str(pid)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def _open_log(path: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended in between
        os.kill(pid, number)
