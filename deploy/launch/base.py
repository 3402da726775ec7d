"""The seam between what a run starts and where it runs: a launcher takes commands and gives handles to watch.

    Supervisor ──Command──► Launcher.start ──► Handle   exit code, log, orderly stop, kill

A supervisor asks a handle to terminate, gives it as long as its role needs, and kills it then. A user's own launcher
subclasses `Launcher`, and `Handle` or a launcher of ours that it wraps.
"""

import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from broker.connection.address import without_secrets
from learner.checkpoints.disk import is_full

from .farewell import ENVIRONMENT

BROKER = "HEADWAY_BROKER"
TAIL_LINES = 12
ERROR_PREFIX = "Error: "
"""The command line starts its one-paragraph errors with this; nothing else in a log does."""

NO_MORE_OF_IT = re.compile(r"\n(?=\s*(\n|$)|[IWEF]\d{4} \d\d:|\d\d:\d\d:\d\d |Traceback \()")
"""Where that paragraph ends: torchrun goes on with a report of its own, and other ranks with their logs."""


@dataclass(frozen=True)
class Resources:
    """What a command takes of the machine on which it is started; None where the recipe leaves that open."""

    processes: int = 1
    """Ranks of a learner, which torchrun starts."""
    threads: int | None = None
    """Of each process, on CPU cores."""
    gpus: int | None = None
    """How many, of all processes together; 0: it uses none."""
    devices: str | None = None
    """Which of them, as CUDA_VISIBLE_DEVICES names them; None: whichever the launcher gives it."""

    def variables(self) -> dict[str, str]:
        """They are set before numpy and torch are imported: later is too late for OpenMP, and a process that has seen
        all GPUs cannot be given one."""
        threads = (
            {} if self.threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), f"{self.threads}")
        )
        return threads if self.devices is None else threads | {"CUDA_VISIBLE_DEVICES": self.devices}


@dataclass(frozen=True)
class Command:
    """What to start."""

    name: str
    argv: tuple[str, ...]
    log: Path | None
    """What it prints is appended to this file; None: it shares our terminal."""
    cwd: Path | None = None
    """The launcher makes it where it is missing; None: our own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    relay: bool = False
    """Signals go to its children instead: torchrun cuts drains short."""
    farewell: Path | None = None
    """This file is there once the command has done its work, see `farewell.py`; None: its exit code is believed."""

    def variables(self) -> dict[str, str]:
        """What its process has in its environment on top of the launcher's own."""
        farewell = {} if self.farewell is None else {ENVIRONMENT: str(self.farewell)}
        return {
            "HEADWAY_IMPORT_PATH": os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()),
            "PYTHONSAFEPATH": "1",  # a folder of the user's called `broker` must not shadow ours
            "PYTHONUNBUFFERED": "1",  # logs are whole even after kill -9
            **self.resources.variables(),
            **self.environment,
            **farewell,
        }

    def shown_variables(self) -> dict[str, str]:
        """The same as anybody may see them and set them in a terminal: no password, and no file of a supervisor's."""
        shown = {name: value for name, value in self.variables().items() if name != ENVIRONMENT}
        return shown | ({BROKER: without_secrets(shown[BROKER])} if BROKER in shown else {})

    def directory(self) -> Path:
        """In which it is started."""
        return self.cwd or Path.cwd()

    def line(self) -> str:
        """For a shell: the command in its directory, with `shown_variables` set."""
        place = shlex.quote(str(self.directory()))
        settings = [f"{name}={value}" for name, value in self.shown_variables().items()]
        return f"(mkdir -p {place} && cd {place} && {shlex.join(('exec', 'env', *settings, *self.argv))})"


class Handle(ABC):
    """A started Command."""

    def __init__(self, command: Command) -> None:
        self.command = command

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Does not block."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end in an orderly way (SIGTERM). Does not block; idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End it and all that it started, at once; nothing of it is left once this returns. Idempotent."""

    @abstractmethod
    def log(self) -> str:
        """The end of what this start has printed, at most some 64 KiB; empty where it shares our terminal."""

    def is_done(self) -> bool:
        """It has ended as it should, its work done or handed back."""
        farewell = self.command.farewell
        return self.exit_code() == 0 and (farewell is None or farewell.exists())

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
        said = _said("\n" + self.log())
        return f"{said}\n(The disk of its log is full. Make room.)" if is_full(self.command.log) else said


class Launcher(ABC):
    """Starts commands. Supervisors call it from the main thread alone."""

    starts_processes: ClassVar[bool] = True
    """False: nothing runs, is written or waited for; a handle is done as soon as it is there."""

    @abstractmethod
    def start(self, command: Command) -> Handle:
        """Start it without waiting for it. A command may be started again once its handle before has ended.

        Its farewell file of before is gone and its directory is there. Raises OSError where it cannot be started.
        """


def _said(text: str) -> str:
    _, found, error = text.rpartition("\n" + ERROR_PREFIX)
    if found:
        return NO_MORE_OF_IT.split(error, maxsplit=1)[0].strip()
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return "\n".join(lines) if lines else "it printed nothing"
