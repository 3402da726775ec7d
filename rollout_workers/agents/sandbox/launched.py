"""Sandboxes that run CPython in processes of their own: one for each run, started and watched by `launcher.py`."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .base import NO_FILES, OUTCOMES, Ran, Sandbox, SandboxOptions

LAUNCHER = Path(__file__).with_name("launcher.py")
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}
"""All that a run sees of the environment: nothing of the worker's."""
OPEN_FILES = 128
GRACE_SECONDS = 60.0
"""How much longer than a run its launcher may take, on a machine that is busy, before it is ended too."""


class LaunchedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher is to start. Its standard input is the bootstrap's."""

    argv: list[str]
    environment: dict[str, str] = msgspec.field(default_factory=lambda: dict(ENVIRONMENT))
    sandlock: dict[str, Any] | None = None
    """The arguments of sandlock's class, without where the code may write; None: `argv` confines by itself."""
    cleanup: list[str] | None = None
    """A command that ends what the launcher cannot see."""
    watch: bool = True
    """Whether the processes below the launcher are the run's."""
    own_tasks: int = 0
    """How many of them are the sandbox's own."""
    chdir: str = ""
    """Where the code runs, if the command doesn't go there itself."""
    limits_processes: bool = False
    """Whether the processes of the user in the sandbox are those of the run alone, so that the kernel can count."""


class LaunchedSandbox(Sandbox):
    """Runs CPython, afresh for each run."""

    keeps_state = False

    def __init__(self, options: SandboxOptions) -> None:
        """Prepare for runs; nothing is started."""
        super().__init__(options)
        self._lock = asyncio.Lock()
        self._launcher: asyncio.subprocess.Process | None = None

    @abstractmethod
    def command(self) -> LaunchedCommand:
        """Return what the launcher is to start for one run."""

    async def run(self, code: str, files: Mapping[str, bytes] = NO_FILES, stdin: str = "") -> Ran:
        """Run code in a process of its own."""
        async with self._lock:
            if refused := self.refusal(code, files, stdin):
                return refused
            return await self._launched(self._asked(code, files, stdin))

    async def close(self) -> None:
        """End the run, if there is one: it is `killed`."""
        self.is_closed = True
        if self._launcher is not None:
            _let_go(self._launcher)
        async with self._lock:
            pass

    def _asked(self, code: str, files: Mapping[str, bytes], stdin: str) -> bytes:
        command, options = self.command(), self.options
        run = {
            "code": code,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "limits": _limits(options, command.limits_processes),
            "chdir": command.chdir,
            "python_path": list(options.python_path),
        }
        text = json.dumps(run).encode()
        payload = b"%016d" % len(text) + text + stdin.encode()
        asked = msgspec.to_builtins(command) | {
            "payload": base64.b64encode(payload).decode(),
            "seconds": options.seconds,
            "memory_bytes": options.memory_bytes,
            "tasks": options.processes + command.own_tasks,
            "output_bytes": options.output_bytes,
            "scratch_bytes": options.scratch_bytes,
            "sandlock_path": sandlock_path() if command.sandlock else "",
        }
        return json.dumps(asked).encode() + b"\n"

    async def _launched(self, asked: bytes) -> Ran:
        begun = time.monotonic()
        launcher = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(LAUNCHER), env={}, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._launcher = launcher
        answer = b""
        try:
            assert launcher.stdin is not None
            assert launcher.stdout is not None
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(self.options.seconds + GRACE_SECONDS):
                    if not self.is_closed:  # meanwhile
                        launcher.stdin.write(asked)
                        await launcher.stdin.drain()
                        answer = await launcher.stdout.read()
        finally:
            await _ended(launcher)
            self._launcher = None
        return _ran(answer, time.monotonic() - begun)


def _limits(options: SandboxOptions, limits_processes: bool) -> dict[str, int]:
    limits = {
        "RLIMIT_AS": options.memory_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": options.scratch_bytes,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_CPU": int(options.seconds) + 2,  # a second bound of each process, whatever becomes of the launcher
    }
    return limits | ({"RLIMIT_NPROC": options.processes + 2} if limits_processes else {})


def _let_go(launcher: asyncio.subprocess.Process) -> None:
    """Have the launcher end its run: it does so when its standard input ends."""
    if launcher.stdin is not None:
        launcher.stdin.close()


async def _ended(launcher: asyncio.subprocess.Process) -> None:
    """Wait until a launcher and all that it started has ended, however often this is cancelled."""
    _let_go(launcher)
    ending = asyncio.ensure_future(_wait_or_kill(launcher))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _wait_or_kill(launcher: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await launcher.wait()
    except TimeoutError:  # such as one that was stopped by a signal
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher.pid, signal.SIGKILL)
        await launcher.wait()


def _ran(answer: bytes, seconds: float) -> Ran:
    if not answer:
        return Ran(outcome="killed", error="The run was ended.", seconds=seconds)
    told = json.loads(answer)
    outcome = told["outcome"]
    assert outcome in OUTCOMES
    error = told["error"]
    if outcome not in ("ok", "raised", "refused"):
        error = f"{error}\n{ENDED.get(outcome, '')}".strip()
    return Ran(outcome=outcome, output=told["output"], error=error, seconds=told.get("seconds", seconds))


ENDED = {
    "timeout": "The code was ended: its time is up.",
    "memory": "The code was ended: it needs more memory than it may have.",
    "processes": "The code was ended: it started more processes than it may have.",
    "output": "The code was ended: it wrote more than it may.",
    "disk": "The code was ended: its files are larger than they may be.",
    "killed": "The code was ended by a signal.",
}


def interpreter() -> tuple[str, str]:
    """Return the real path of this process's Python, without its virtual environment, and where its library is."""
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)


def bootstrap_argv(python: str) -> list[str]:
    """Return the command that runs what its standard input holds."""
    return [python, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP.read_text()]


def sandlock_path() -> str:
    """Return the directory that has the package sandlock."""
    from importlib.util import find_spec

    found = find_spec("sandlock")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent.parent)
