"""The seam between a run's processes and the place where they run: a launcher takes commands and returns handles.

    Supervisor ──Command──► Launcher.start ──► Handle   exit code, log, orderly stop, kill

A supervisor asks a handle to terminate, waits as long as its role needs, and then kills it. A user's own launcher
subclasses `Launcher`; its handles subclass `Handle`, or come from a launcher of Headway's that it wraps.
"""

import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headway.broker.connection.address import PASSWORD, without_secrets
from headway.broker.errors import SIGNALLED_EXIT
from headway.learner.disk import FULL_IN_WORDS, is_full

if TYPE_CHECKING:
    from headway.deploy.recipe.recipe import Recipe


EXIT_NOTICE = "HEADWAY_FAREWELL"
"""The variable that names the file of the exit notice to a role's process: the role writes it when its work is done.

Exit code 0 does not say so, since a user's code may call `os._exit(0)`. The supervisor looks for the file once the
process has ended."""
DRAIN_NOTICE = "the learner finishes its step and writes a checkpoint"
"""The work of a learner that is asked to stop. Its supervisor says so, or the learner itself where it has none."""


def write_exit_notice() -> None:
    """Write the file. The role itself calls this last, when a worker has handed its work back or a learner has
    concluded. Its directory may be gone: the last other process of the run on this node removes it."""
    if path := os.environ.get(EXIT_NOTICE):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()


BROKER = "HEADWAY_BROKER"
WORKER_TAG = "HEADWAY_WORKER_TAG"
"""The variable with the end of a worker's name, by which its supervisor knows it among all workers."""
WORKER_SESSION = "HEADWAY_WORKER_SESSION"
"""The variable with a worker's session, a secret by which its supervisor hands its leases back once it is dead."""
PREWARM = "HEADWAY_AHEAD"
"""The variable with the run's recipe on this machine, for workers that may open an engine before the learner is there.
One that shares a GPU with the learner has none, unless its engine is told how much memory it gets: otherwise it
measures, while it opens, the memory that is free."""
DONE_EXITS = (0, SIGNALLED_EXIT)
TRACEBACK = "Traceback (most recent call last):"
TAIL_LINES = 12
ERROR_PREFIX = "Error: "
"""The start of the command line's one-paragraph errors. No other line of a log starts with it."""

END_OF_ERROR = re.compile(r"\n(?=\s*(\n|$)|[IWEF]\d{4} \d\d:|\d\d:\d\d:\d\d |Traceback \()")
"""The end of that paragraph: torchrun goes on with a report of its own, and other ranks go on with their logs."""


@dataclass(frozen=True)
class Resources:
    """The resources that a command takes on its machine; None where the recipe leaves that open."""

    processes: int = 1
    """Ranks of a learner, which torchrun starts."""
    threads: int | None = None
    """CPU threads of each process."""
    gpus: int | None = None
    """GPUs of all processes together; 0: the command uses none."""
    devices: str | None = None
    """The GPUs as CUDA_VISIBLE_DEVICES names them; None: the launcher chooses them."""

    def variables(self) -> dict[str, str]:
        """Return environment variables that must be set before numpy and torch are imported: OpenMP reads them only
        once, and a process that has seen all GPUs cannot be limited to one."""
        threads = (
            {} if self.threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), f"{self.threads}")
        )
        return threads if self.devices is None else threads | {"CUDA_VISIBLE_DEVICES": self.devices}


@dataclass(frozen=True)
class Command:
    """A process to start."""

    name: str
    argv: tuple[str, ...]
    log: Path | None
    """The file to which its output is appended; None: it shares this process's terminal."""
    cwd: Path | None = None
    """Its working directory, which the launcher makes if it is missing; None: this process's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    relay: bool = False
    """Whether signals go to its children instead: torchrun cuts drains short."""
    exit_notice: Path | None = None
    """The file that exists once the command has done its work, see `write_exit_notice`; None: its exit code decides."""
    role: str = ""
    """The process's role: learner (also in the stages before), worker or scorer; empty for other commands."""
    pool: str = ""
    """The pool that it belongs to; empty: none."""
    number: int = 0
    """Its number in its pool, from 0."""
    tag: str = ""
    """A worker's tag, new with every start: no other process can know it before the worker reports."""
    session: str = ""
    """A worker's session, new with every start: no other process ever knows it."""

    def variables(self) -> dict[str, str]:
        """Return what its process has in its environment on top of the launcher's own."""
        exit_notice = {} if self.exit_notice is None else {EXIT_NOTICE: str(self.exit_notice)}
        own = {WORKER_TAG: self.tag, WORKER_SESSION: self.session}
        return {
            "HEADWAY_IMPORT_PATH": os.environ.get("HEADWAY_IMPORT_PATH", os.getcwd()),
            "PYTHONSAFEPATH": "1",  # a user's folder called `broker` must not shadow Headway's
            "PYTHONUNBUFFERED": "1",  # logs are whole even after kill -9
            **self.resources.variables(),
            **self.environment,
            **exit_notice,
            **{name: value for name, value in own.items() if value},
        }

    def shown_variables(self) -> dict[str, str]:
        """Return the variables that may be shown and set in a terminal: without a password and without a supervisor's
        file."""
        hidden = (EXIT_NOTICE, WORKER_TAG, WORKER_SESSION)
        shown = {name: value for name, value in self.variables().items() if name not in hidden}
        return shown | ({BROKER: without_secrets(shown[BROKER])} if BROKER in shown else {})

    def directory(self) -> Path:
        """Return the directory in which it is started."""
        return self.cwd or Path.cwd()

    def line(self) -> str:
        """Return the command for a shell: in its directory, with `shown_variables` set."""
        place = shlex.quote(str(self.directory()))
        settings = [f"{name}={value}" for name, value in self.shown_variables().items()]
        return f"(mkdir -p {place} && cd {place} && {shlex.join(('exec', 'env', *settings, *self.argv))})"


class Handle(ABC):
    """A started Command."""

    def __init__(self, command: Command) -> None:
        self.command = command

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return its exit code: None while it runs; negative: the signal that ended it. Does not block."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end in an orderly way (SIGTERM). Does not block; idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End it and all that it started, at once. None of its processes is left once this returns. Idempotent."""

    def begin_kill(self, *, is_patient: Callable[[], bool] = lambda: True) -> None:  # noqa: B027 - `kill` is enough
        """Begin what `kill` completes, so that several processes end side by side. Does not block; idempotent. Once
        `is_patient` returns False that `kill` waits for nothing that only tidies up. By default it does nothing."""

    @abstractmethod
    def log(self) -> str:
        """Return the end of what this start has printed, at most some 64 KiB; empty if it shares this process's
        terminal."""

    def has_place(self) -> bool:
        """Whether its process has been started. False while its launcher waits for room for it. Does not block."""
        return True

    def is_done(self) -> bool:
        """Whether it has ended as it should, with its work done or handed back."""
        exit_notice = self.command.exit_notice
        return self.exit_code() in DONE_EXITS and (exit_notice is None or exit_notice.exists())

    def describe_exit(self) -> str:
        """Return words such as `exited with code 1` or `was killed by SIGKILL`."""
        code = self.exit_code()
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if code == SIGNALLED_EXIT and self.is_done():
            return "was asked to leave by a signal that its supervisor did not send"
        if code == 0 and not self.is_done():
            return "exited with code 0 in the midst of its work (does code of yours call sys.exit or os._exit?)"
        return f"exited with code {code}"

    def last_words(self) -> str:
        """Return the last error of this start, or else the last lines of its log, and why these may be missing."""
        if self.command.log is None:
            return "its error stands above."
        said = _last_error("\n" + self.log())
        return f"The disk of its log is full. Make room. {said}" if is_full(self.command.log) else said

    def needs_room(self) -> bool:
        """Whether its disk is full, or its last words say that one is."""
        log = self.command.log
        return log is not None and (is_full(log) or any(words in self.last_words() for words in FULL_IN_WORDS))


class Launcher(ABC):
    """Starts commands. Supervisors call it from the main thread only."""

    starts_processes: ClassVar[bool] = True
    """False: nothing runs, is written or waited for, and a handle is done from the start."""

    def check(self, recipe: "Recipe") -> None:  # noqa: B027 - most launchers can start every recipe
        """Raise ConfigError, before anything is written, for a recipe whose processes could not run where it starts
        them."""

    @abstractmethod
    def start(self, command: Command) -> Handle:
        """Start the command without waiting for it. A command may be started again once its previous handle has ended.

        The launcher removes the exit notice of the previous start and makes the directory. Raises OSError if the
        command cannot be started.
        """


def _last_error(text: str) -> str:
    _, found, error = text.rpartition("\n" + ERROR_PREFIX)
    if found:
        return END_OF_ERROR.split(error, maxsplit=1)[0].strip()
    *before, trace = text.split(TRACEBACK)
    if before:  # a traceback in one line helps no reader, and the log has it: its error is what was said
        errors = [line for line in trace.splitlines() if line.strip() and not line[0].isspace()]
        return errors[0] if errors else "its log breaks off within a traceback"
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return "\n".join(lines) if lines else "it printed nothing"


class PrintedLauncher(Launcher):
    """The launcher of `--dry-run`: it hands every command to `show`, in the order of start, and starts nothing."""

    starts_processes = False

    def __init__(self, show: Callable[[Command], object]) -> None:
        self._show = show

    def start(self, command: Command) -> "PrintedHandle":
        self._show(command)
        return PrintedHandle(command)


class PrintedHandle(Handle):
    """The handle of a shown command: it is done from the start."""

    def exit_code(self) -> int:
        return 0

    def is_done(self) -> bool:
        return True

    def terminate(self) -> None:
        """Do nothing: no process runs."""

    def kill(self) -> None:
        """Do nothing: no process runs."""

    def log(self) -> str:
        return ""


def as_text(command: Command) -> str:
    """Return a comment with the command's name and resources, and the command's line for a shell."""
    takes = "; ".join([*_resource_words(command.resources), *([f"log: {command.log}"] if command.log else [])])
    url = command.variables().get(BROKER, "")
    hidden = [f"# Its URL's password is not shown: set {PASSWORD}."] if url and without_secrets(url) != url else []
    return "\n".join([f"# {command.name}" + (f": {takes}" if takes else ""), *hidden, command.line()])


def as_builtins(command: Command) -> dict[str, Any]:
    """Return the command for JSON."""
    taken = command.resources
    return {
        "name": command.name,
        "argv": command.argv,
        "environment": command.shown_variables(),
        "directory": str(command.directory()),
        "log": str(command.log) if command.log else None,
        "resources": {
            "processes": taken.processes,
            "threads": taken.threads,
            "gpus": taken.gpus,
            "devices": taken.devices,
        },
        "line": command.line(),
    }


def _resource_words(resources: Resources) -> list[str]:
    taken = [] if resources.processes == 1 else [f"{resources.processes} processes"]
    if resources.gpus is not None:
        taken.append(f"{resources.gpus or 'no'} GPU{'s' * (resources.gpus != 1)}")
    if resources.devices is not None:
        taken[-1:] = [f"{taken[-1]} ({resources.devices})"] if taken else [f"GPUs {resources.devices}"]
    if resources.threads is not None:
        taken.append(f"{resources.threads} thread{'s' * (resources.threads != 1)} each")
    return taken
