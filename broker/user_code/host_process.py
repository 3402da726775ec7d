"""One process of a host, as its caller sees it: from its start until it ends or is killed."""

import asyncio
import itertools
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, Self

import msgspec

from headway.broker.errors import ConfigError, UserCodeError

from .wire import LENGTH, MAX_FRAME_BYTES, Call, CallAnswer, Program, frame

MOST_OUTPUT_BYTES, OUTPUT_S = 1 << 20, 60.0
"""The most bytes that a process may print into the log of its caller, in so many seconds."""
CHUNK_BYTES = 1 << 16
FLUSH_S = 1.0
"""The longest wait for what a process had printed before it ended."""
END_S = 5.0
"""A process may take so long to end after its channel has closed, and again after it was killed."""


class HostLostError(UserCodeError):
    """The host was killed, or ended by itself, during this call, which may or may not be at fault."""


class RefusedError(UserCodeError):
    """The program refused the call's arguments with one of Headway's own errors."""


class HostProcess:
    """A process with an opened program. `start` makes it, on the event loop on which it is used."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[CallAnswer]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._end = ""
        self.places = asyncio.Semaphore(1)
        """A caller holds it during a call."""

    @classmethod
    async def start(cls, program: Program, most_places: int) -> Self:
        """Returns a new process that has opened `program`. Raises ConfigError with the program's reason where it cannot
        be opened, UserCodeError where opening it hangs or ends the process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway.broker.user_code.host"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=_directory_of(program),
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        host = cls(process)
        host._forwarding = asyncio.create_task(host._forward(program.name))
        try:
            places = await host._open(program)
        except BaseException:
            await host.lose("its opening failed")
            raise
        host.places = asyncio.Semaphore(min(places, most_places))
        return host

    @property
    def is_lost(self) -> bool:
        """Whether the process takes no more calls."""
        return bool(self._end)

    async def call(self, method: str, arguments: list[Any], deadline_s: float) -> Any:
        """Returns the method's result. Raises UserCodeError where the method raises, HostLostError where the deadline
        passes, at which the process is killed, or where it ends meanwhile."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(Call(number, method, arguments))
                answer = await answered
        except TimeoutError:
            await self.lose(f"ran past its deadline of {deadline_s:g} s")
            raise HostLostError(self._end) from None
        finally:
            self._waiting.pop(number, None)
        if answer.raised is not None:
            raise (RefusedError if answer.is_refusal else UserCodeError)(answer.raised)
        return answer.value

    async def lose(self, reason: str) -> None:
        """Kill the process and all that it has started. Calls in it fail. Idempotent."""
        if not self._end:
            self._end = reason
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        if self._forwarding is not None:  # what it has written before its end; another process may hold the pipe
            await asyncio.wait([self._forwarding], timeout=FLUSH_S)
            self._forwarding.cancel()
        if self._listening is not None and self._listening is not asyncio.current_task():
            self._listening.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(HostLostError(self._end))

    async def _open(self, program: Program) -> int:
        """Open the program, and return how many calls it takes at once."""
        try:
            async with asyncio.timeout(program.open_s):
                await self._write(frame(program))
                answer = await self._read()
        except TimeoutError:
            raise UserCodeError(f"{program.name}: opening it took more than {program.open_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise UserCodeError(f"{program.name}: opening it {await self._describe_end()}") from None
        if answer.raised is not None:
            raise ConfigError(answer.raised)
        self._listening = asyncio.create_task(self._listen())
        return int(answer.value)

    async def _listen(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            while True:
                answer = await self._read()
                answered = self._waiting.get(answer.number)
                if answered is not None and not answered.done():
                    answered.set_result(answer)
        await self.lose(await self._describe_end())

    async def _forward(self, name: str) -> None:
        """Write what the process prints to this process's stderr, up to a bound for each minute, and say how much was
        left out."""
        assert self._process.stderr is not None
        left, left_out, until_s = MOST_OUTPUT_BYTES, 0, time.monotonic() + OUTPUT_S
        is_open = True
        while is_open:
            chunk = await self._process.stderr.read(CHUNK_BYTES)
            is_open, is_over = bool(chunk), time.monotonic() > until_s
            if left_out and (is_over or not is_open):
                _to_stderr(f"\n{name}: {left_out:,} bytes of its output were left out of this log.\n".encode())
            if is_over:
                left, left_out, until_s = MOST_OUTPUT_BYTES, 0, time.monotonic() + OUTPUT_S
            _to_stderr(chunk[:left])
            left_out += len(chunk[left:])
            left = max(0, left - len(chunk))

    async def _describe_end(self) -> str:
        """Return how the process ended, such as `ended its process with exit code 0`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                ending = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                return f"ended its process with {ending}"
        return "closed its process's channel"

    async def _send(self, call: Call) -> None:
        with suppress(ConnectionError):  # the process has ended, which the listener will notice
            await self._write(frame(call))

    async def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.is_closing():  # uvloop noticed its end at an earlier write, and takes no further one
            raise ConnectionResetError
        self._process.stdin.write(message)
        await self._process.stdin.drain()

    async def _read(self) -> CallAnswer:
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ConnectionError(f"an answer of {length} bytes")
        return msgspec.msgpack.decode(await self._process.stdout.readexactly(length), type=CallAnswer)


def _to_stderr(output: bytes) -> None:
    with suppress(OSError):  # a log that takes no more must not cost the call
        os.write(2, output)


def _directory_of(program: Program) -> str | None:
    """Return the directory of the operator's command, in which user code finds its relative paths; None if it is
    gone."""
    return program.import_path if os.path.isdir(program.import_path) else None
