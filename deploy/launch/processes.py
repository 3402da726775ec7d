"""The `local` launcher: each command is a child process with a session of its own, tethered to this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from learner.checkpoints.disk import gone

from . import tether
from .base import ERROR_PREFIX, Command, Handle, Launcher

TAIL_BYTES = 64 * 1024


class LocalLauncher(Launcher):
    """Starts child processes on this machine. The kernel ends them if this process is killed."""

    def start(self, command: Command) -> "Child":
        return Child(command)


class Child(Handle):
    """A child process."""

    def __init__(self, command: Command) -> None:
        super().__init__(command)
        if command.farewell is not None:
            command.farewell.unlink(missing_ok=True)  # left by the process before
        if command.cwd is not None:
            command.cwd.mkdir(parents=True, exist_ok=True)
        with _open_log(command.log) as log:
            self._log_start = 0 if log is None else log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                cwd=command.cwd,
                env={**os.environ, tether.ENVIRONMENT: "1", **command.variables()},
                start_new_session=True,
            )

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

    def kill(self) -> None:
        """End it and all that it started, at once, and reap it. Idempotent."""
        with suppress(ProcessLookupError):  # the whole group has ended already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

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
