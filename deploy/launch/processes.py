"""One role as a child process: own session, own log, tethered to us, and its last words when it dies."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from learner.checkpoints.disk import gone, is_full

from . import tether
from .farewell import ENVIRONMENT

TAIL_BYTES = 64 * 1024
TAIL_LINES = 12
ERROR_PREFIX = "Error: "
"""The command line starts its one-paragraph errors with this; nothing else in a log does."""

NO_MORE_OF_IT = re.compile(r"\n(?=\s*(\n|$)|[IWEF]\d{4} \d\d:|\d\d:\d\d:\d\d |Traceback \()")
"""Where that paragraph ends: torchrun goes on with a report of its own, and other ranks with their logs."""


@dataclass(frozen=True)
class Command:
    """What to start. `cwd` None: ours. `relay`: signal its children instead (torchrun cuts drains short). `farewell`: a
    file that is there once it has done its work, see `farewell.py`; None: its exit code is believed."""

    name: str
    argv: tuple[str, ...]
    log: Path | None
    """None: it shares our terminal."""
    cwd: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    relay: bool = False
    farewell: Path | None = None


class Child:
    """A started Command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        farewell = {} if command.farewell is None else {ENVIRONMENT: str(command.farewell)}
        if command.farewell is not None:
            command.farewell.unlink(missing_ok=True)  # of the process before
        with _open_log(command.log) as log:
            self._log_start = 0 if log is None else log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                cwd=command.cwd,
                env=child_environment({**command.environment, **farewell}),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Also the id of its session and process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def is_done(self) -> bool:
        """It has ended as it should, its work done or handed back."""
        farewell = self.command.farewell
        return self.exit_code() == 0 and (farewell is None or farewell.exists())

    def terminate(self) -> None:
        """Ask it to end in an orderly way (SIGTERM). Idempotent."""
        if self.exit_code() is None:
            for pid in self._addressees():
                _signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once, and reap it. Idempotent."""
        with suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def describe_exit(self) -> str:
        """Such as `exited with code 1` or `was killed by SIGKILL`."""
        code = self.exit_code()
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if code == 0 and not self.is_done():
            return "exited with code 0 in the midst of its work (does code of yours call sys.exit or os._exit?)"
        return f"exited with code {code}"

    def last_words(self) -> str:
        """The error it printed last, else the last lines of its log, of this start only; and why there may be none."""
        if self.command.log is None:
            return "its error stands above."
        said = self._said(self._own_log(self.command.log))
        return f"{said}\n(The disk of its log is full. Make room.)" if is_full(self.command.log) else said

    def _said(self, text: str) -> str:
        _, found, error = text.rpartition("\n" + ERROR_PREFIX)
        if found:
            return NO_MORE_OF_IT.split(error, maxsplit=1)[0].strip()
        lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
        return "\n".join(lines) if lines else "it printed nothing"

    def _own_log(self, path: Path) -> str:
        try:
            with path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - TAIL_BYTES))
                return "\n" + log.read().decode(errors="replace")
        except FileNotFoundError:
            return f"\n{ERROR_PREFIX}{gone(path.parent)}"
        except OSError as error:
            return f"\n({path} cannot be read: {error})"

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
    """The process `pid` (our server) gets SIGTERM should we be killed meanwhile."""
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


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours, plus what ties children to us and lets them import the user's modules from any folder."""
    return {
        **os.environ,
        tether.ENVIRONMENT: "1",
        "HEADWAY_IMPORT_PATH": os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()),
        "PYTHONSAFEPATH": "1",  # a folder of the user's called `broker` must not shadow ours
        "PYTHONUNBUFFERED": "1",  # logs are whole even after kill -9
        **extra,
    }


def _open_log(path: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended in between
        os.kill(pid, number)
