"""The `local` launcher: each command is a child process with a session of its own, which ends with this process.

A child has a directory for temporary files of its own, which is removed with it, however it ends. Engines put sockets
and files there, under names that only they know: a process that is killed leaves all of them, and one that ends in
order leaves some."""

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from headway.broker.installation import SHARED_TMPDIR, shared_temporary_directory
from headway.learner.disk import gone

from . import parent_watch
from .base import ERROR_PREFIX, Command, Handle, Launcher

IN_RAM = Path("/dev/shm")
LONGEST_DIRECTORY = 48
"""Bytes of a directory in which the one for temporary files can lie: engines make sockets and directories of sockets
there, and the path of a socket may have 107."""
SHORT_DIRECTORY = "/tmp"
"""The directory that is taken where the others are longer."""
VLLM_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""Matches the name of the file by which vLLM's processes meet, which no other process has by chance: half of it is
random. They call the shared memory through which they talk NAME-..., with the name of that file."""


class TemporaryFiles:
    """The directory of one process and of those that it starts."""

    def __init__(self, preferred: Path) -> None:
        """Make it in the directory `preferred` if that is short. Raises OSError."""
        parents = (str(preferred), str(shared_temporary_directory()), SHORT_DIRECTORY)
        parent = next((one for one in parents if len(os.fsencode(one)) <= LONGEST_DIRECTORY), SHORT_DIRECTORY)
        self._directory = Path(tempfile.mkdtemp(prefix="headway-", dir=parent))

    def variables(self) -> dict[str, str]:
        """Return environment variables by which the process takes it. What torch has compiled stays where torch keeps
        it in a process without such a directory."""
        usual = shared_temporary_directory()
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(usual / f"torchinductor_{_name_in_caches()}")
        return {"TMPDIR": str(self._directory), SHARED_TMPDIR: str(usual), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def remove(self) -> None:
        """Remove it, and shared memory that vLLM has named after a file in it. Its processes must have ended.
        Idempotent."""
        for path in self._shared_memory():
            with suppress(OSError):  # the others are removed all the same
                path.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _shared_memory(self) -> list[Path]:
        with suppress(OSError):  # it is removed already, or this system has no such directory
            names = tuple(f"{name}-" for name in os.listdir(self._directory) if VLLM_RENDEZVOUS.fullmatch(name))
            return [path for path in IN_RAM.iterdir() if path.name.startswith(names) and _is_ours(path)]
        return []


def _name_in_caches() -> str:
    """Return this user's name as torch writes it in the name of its cache."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):  # containers have users without a name
        return f"uid_{os.getuid()}"


def _is_ours(path: Path) -> bool:
    with suppress(OSError):  # it is gone
        return path.lstat().st_uid == os.geteuid()
    return False


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
        self._kill_deadline_s: float | None = None
        self._is_patient: Callable[[], bool] = lambda: True
        if command.exit_notice is not None:
            command.exit_notice.unlink(missing_ok=True)  # left by the process before
        if command.cwd is not None:
            command.cwd.mkdir(parents=True, exist_ok=True)
        with _open_log(command.log) as log, ExitStack() as until_started:
            self._log_start = 0 if log is None else log.seek(0, os.SEEK_END)
            self._temporary = TemporaryFiles(command.directory()) if command.pool else None
            if self._temporary is not None:
                until_started.callback(self._temporary.remove)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", parent_watch.__file__, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                cwd=command.cwd,
                env={**os.environ, parent_watch.WATCHES_PARENT: "1", **self._own_variables(), **command.variables()},
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
        return self._process.poll()

    def terminate(self) -> None:
        if self.exit_code() is None:
            for pid in self._addressees():
                _signal(pid, signal.SIGTERM)

    def begin_kill(self, *, is_patient: Callable[[], bool] = lambda: True) -> None:
        """Kill it and all that it started but trackers of shared memory. Once `is_patient` returns False these are left
        to end by themselves, as soon as all others have ended."""
        if self._kill_deadline_s is None:
            self._is_patient = is_patient
            self._kill_deadline_s = time.monotonic() + PATIENCE_S
        self._process.kill()
        self._kill_group()

    def kill(self) -> None:
        """End it and all that it started, at once, reap it, and remove what they left. Idempotent."""
        if self._kill_deadline_s is None:
            self.begin_kill()
        assert self._kill_deadline_s is not None
        self._process.wait()
        while (are_trackers := self._kill_group()) and self._is_patient() and time.monotonic() < self._kill_deadline_s:
            time.sleep(LOOK_S)
        if self._is_patient() or not any(are_trackers):
            with suppress(ProcessLookupError):  # the whole group has ended already
                os.killpg(self.pid, signal.SIGKILL)
        if self._temporary is not None:
            self._temporary.remove()

    def _kill_group(self) -> list[bool]:
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
        [sys.executable, "-IS", parent_watch.__file__, "--guard", str(os.getpid()), str(pid)],
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
