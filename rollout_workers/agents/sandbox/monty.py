"""A subset of Python in pydantic-monty's interpreter, which has no files of the machine, no processes and no network.

The interpreter runs in a process of its own, so that a crash of it ends that process alone.
"""

import asyncio
import contextlib
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .base import NO_FILES, Ran, Sandbox, SandboxOptions

SCRATCH = "/scratch"
SPARE_BYTES = 1 << 30
"""How much address space its process may have beside what the interpreter counts: for its own code and stacks."""
GRACE_SECONDS = 30.0
"""How much longer a run may wait for sleeps and files, on a machine that is busy, before its process is ended."""
LOST = "What earlier runs defined is lost."


class MontySandbox(Sandbox):
    """Keeps one interpreter for the runs of an episode; a run that had to be ended costs what it had defined."""

    kind = "monty"
    keeps_state = True

    def __init__(self, options: SandboxOptions) -> None:
        """Prepare for runs; the interpreter is started with the first one."""
        super().__init__(options)
        self._lock = asyncio.Lock()
        self._session: Any = None
        self._pool: Any = None
        self._running: asyncio.Task[Ran] | None = None

    async def run(self, code: str, files: Mapping[str, bytes] = NO_FILES, stdin: str = "") -> Ran:
        """Run code in the episode's interpreter."""
        async with self._lock:
            if refused := self.refusal(code, files, stdin):
                return refused
            begun = time.monotonic()
            self._running = asyncio.ensure_future(self._run(code, files, stdin))
            try:
                return await self._running
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if not self.is_closed or (current is not None and current.cancelling()):
                    raise
                return Ran(outcome="killed", error="The sandbox was closed.", seconds=time.monotonic() - begun)
            finally:
                self._running = None

    async def close(self) -> None:
        """End the interpreter; a run that goes on is `killed`."""
        self.is_closed = True
        if self._running is not None:
            self._running.cancel()
        async with self._lock:
            await self._end()

    async def _run(self, code: str, files: Mapping[str, bytes], stdin: str) -> Ran:
        begun = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix="headway-sandbox-"))
        told = _Told(self.options.output_bytes)
        try:
            if error := _write(directory, files):
                return Ran(outcome="refused", error=error)
            outcome, error = await self._fed(code, directory, told, stdin)
        except BaseException:
            await self._end()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if outcome not in ("ok", "raised", "disk", "refused"):
            await self._end()
            error = f"{error}\n{LOST}"
        error = told.texts["stderr"] + error
        return Ran(outcome=outcome, output=told.texts["stdout"], error=error, seconds=time.monotonic() - begun)

    async def _fed(self, code: str, directory: Path, told: "_Told", stdin: str) -> tuple[Any, str]:
        import pydantic_monty

        size, lines = self.options.scratch_bytes, iter(stdin.splitlines())
        mount = pydantic_monty.MountDir(
            host_path=directory, virtual_path=SCRATCH, write_bytes_limit=size, memory_usage_limit=size
        )
        try:
            async with asyncio.timeout(self.options.seconds + GRACE_SECONDS):
                session = await self._ready()
                # None in the last line: the value of the last expression would be made an object of this process.
                feed = session.feed_run(
                    f"{code}\nNone",
                    mount=mount,
                    cwd=SCRATCH,
                    print_callback=told,
                    external_lookup={"input": lambda prompt="": _line(lines)},
                )
                await told.wait(feed)
            return "ok", ""
        except _TooMuchOutputError:
            return "output", "The code was ended: it wrote more than it may."
        except TimeoutError:
            return "timeout", f"The run took longer than {self.options.seconds} s."
        except pydantic_monty.MontyCrashedError as error:
            return ("timeout" if error.timed_out else "killed"), str(error)
        except pydantic_monty.MontyError as error:
            return _outcome(error), error.display() if hasattr(error, "display") else str(error)
        finally:
            mount.close()

    async def _ready(self) -> Any:
        """Return the episode's session, begun anew where there is none."""
        import pydantic_monty

        if self._session is None:
            options = self.options
            pool = pydantic_monty.AsyncMonty(min_processes=1, max_processes=1)
            self._pool = await pool.__aenter__()
            session = pool.checkout(
                limits={
                    "max_feed_duration_secs": options.seconds,
                    "max_memory": options.memory_bytes,
                    "max_suspensions": 1 << 30,  # the run's time bounds them
                },
                os_policy={"sleep": "zero"},  # the interpreter's limit of time leaves sleeps out
            )
            self._session = await session.__aenter__()
            bound = options.memory_bytes + SPARE_BYTES
            resource.prlimit(session.worker_pid, resource.RLIMIT_AS, (bound, bound))
            resource.prlimit(session.worker_pid, resource.RLIMIT_CORE, (0, 0))
        return self._session

    async def _end(self) -> None:
        session, pool = self._session, self._pool
        self._session = self._pool = None
        with contextlib.suppress(Exception):
            if session is not None:
                await session.__aexit__(None, None, None)
        if pool is not None:
            await pool.__aexit__(None, None, None)


class _TooMuchOutputError(Exception):
    """Code prints more than it may."""


class _Told:
    """Keeps what code prints, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.texts = {"stdout": "", "stderr": ""}
        self._left = {"stdout": limit, "stderr": limit}
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()

    def __call__(self, stream: str, text: str) -> None:
        """Keep a piece."""
        encoded = text.encode(errors="replace")
        kept = encoded[: self._left[stream]]
        self.texts[stream] += kept.decode(errors="ignore")
        self._left[stream] -= len(kept)
        if len(encoded) > len(kept):
            self._loop.call_soon_threadsafe(self._is_over.set)

    async def wait(self, feed: asyncio.Future[Any]) -> None:
        """Wait until a run ends. Raises _TooMuchOutputError, and ends the run, when it has printed more than it may."""
        over = asyncio.ensure_future(self._is_over.wait())
        try:
            await asyncio.wait({feed, over}, return_when=asyncio.FIRST_COMPLETED)
            if feed.done():
                feed.result()
            if self._is_over.is_set():
                raise _TooMuchOutputError
        finally:
            over.cancel()
            feed.cancel()  # which ends the process, if it runs still


def _write(directory: Path, files: Mapping[str, bytes]) -> str:
    """Write files; return why one cannot be written, or ""."""
    for name, content in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            return f"The file {name!r} cannot be written: {error}"
    return ""


def _line(lines: Iterator[str]) -> str:
    for line in lines:
        return line
    raise RuntimeError("EOF when reading a line")


def _outcome(error: Any) -> str:
    """Return why a run has ended. Code may raise what looks like a limit: then it has ended itself."""
    raised = error.exception()
    if isinstance(raised, MemoryError):
        return "memory"
    if isinstance(raised, TimeoutError) and "limit exceeded" in str(raised):
        return "timeout"
    return "disk" if isinstance(raised, OSError) and "disk write limit" in str(raised) else "raised"
