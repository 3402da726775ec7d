"""Calls of one program under a deadline, in hosts that are replaced when a call hangs or ends them.

`HostProcess` is one process of a host, as its caller sees it, from its start until it ends or is killed; `Host`
replaces it; `HostPool` spreads calls over hosts; `BlockingHost` serves callers without an event loop.
"""

import asyncio
import itertools
import logging
import os
import secrets
import signal
import sys
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Thread
from typing import Any, Self, TypeVar

import msgspec

from headway.broker.errors import CallDeadlineError, ConfigError, UserCodeError

from .host import CANCEL, LENGTH, MAX_FRAME_BYTES, Call, CallAnswer, Program, frame
from .leftovers import kill_marked

MOST_OUTPUT_BYTES, OUTPUT_S = 1 << 20, 60.0
"""The most bytes that a process may print into the log of its caller, in so many seconds."""
CHUNK_BYTES = 1 << 16
FLUSH_S = 1.0
"""The longest wait for what a process had printed before it ended."""
MARK = "HEADWAY_HOST"
"""The variable by which a process is known to be a host's, or one that it has started."""
ABANDONED_S = 60.0
"""A call whose caller was cancelled may take so long to end, before its process is killed."""
END_S = 5.0
"""A process may take so long to end after its channel has closed, and again after it was killed."""


class HostLostError(UserCodeError):
    """The host was killed, or ended by itself, during this call, which may or may not be at fault."""


class RefusedError(UserCodeError):
    """The program refused the call's arguments with one of Headway's own errors."""


class HostProcess:
    """A process with an opened program. `start` makes it, on the event loop on which it is used."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process = process
        self._mark = mark
        self._abandoned: dict[int, asyncio.TimerHandle] = {}
        """Calls that were cancelled and have not ended, and what kills the process if they do not."""
        self._losing: asyncio.Task[None] | None = None
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
        mark = secrets.token_hex(16)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway.broker.user_code.host"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=_directory_of(program),
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", MARK: mark},
            start_new_session=True,
        )
        host = cls(process, mark)
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

    async def call(self, method: str, arguments: list[Any], deadline_s: float, grace_s: float = 0.0) -> Any:
        """Returns the method's result. Raises UserCodeError where the method raises, HostLostError where the process
        ends meanwhile. Past the deadline it is killed; with `grace_s` the call is cancelled first, and raises
        CallDeadlineError if it ends within so many seconds."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(Call(number, method, arguments))
                answer = await asyncio.shield(answered)
        except TimeoutError:
            past = f"ran past its deadline of {deadline_s:g} s"
            if grace_s and await self._ends_when_cancelled(number, answered, grace_s):
                raise CallDeadlineError(past) from None
            await self.lose(past)
            raise HostLostError(self._end) from None
        except asyncio.CancelledError:
            if not answered.done():
                self._cancel(number)
                if grace_s:
                    self._abandon(number)
            raise
        finally:
            self._waiting.pop(number, None)
            if not answered.cancel() and not answered.cancelled():
                answered.exception()  # of a call that was given up, nobody else looks at it
        if answer.raised is not None:
            raise (RefusedError if answer.is_refusal else UserCodeError)(answer.raised)
        return answer.value

    async def lose(self, reason: str) -> None:
        """Kill the process and all that it has started. Calls in it fail. Idempotent."""
        for timer in self._abandoned.values():
            timer.cancel()
        if not self._end:
            self._end = reason
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        await self._kill_marked()
        if self._forwarding is not None:  # what it has written before its end; another process may hold the pipe
            await asyncio.wait([self._forwarding], timeout=FLUSH_S)
            self._forwarding.cancel()
        if self._listening is not None and self._listening is not asyncio.current_task():
            self._listening.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(HostLostError(self._end))

    async def _kill_marked(self) -> None:
        """Kill what the process has started. It looks at all processes of the machine, in a thread meanwhile."""
        with suppress(OSError):
            try:
                await asyncio.to_thread(kill_marked, MARK, self._mark)
            except RuntimeError:  # this process ends, and starts no thread any more
                kill_marked(MARK, self._mark)

    def _abandon(self, number: int) -> None:
        """Kill the process later, unless it answers this cancelled call before."""
        if not self._end:
            later = asyncio.get_running_loop().call_later(ABANDONED_S, self._lose_abandoned)
            self._abandoned[number] = later

    def _lose_abandoned(self) -> None:
        self._losing = asyncio.create_task(self.lose("did not end a call that was cancelled"))

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
                if (timer := self._abandoned.pop(answer.number, None)) is not None:
                    timer.cancel()
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

    async def _ends_when_cancelled(self, number: int, answered: asyncio.Future[CallAnswer], grace_s: float) -> bool:
        self._cancel(number)
        try:
            await asyncio.wait({answered}, timeout=grace_s)
        except asyncio.CancelledError:
            if not answered.done():
                self._abandon(number)
            raise
        return answered.done() and not self._end

    def _cancel(self, number: int) -> None:
        """Have the process cancel a call, whose answer nobody waits for."""
        assert self._process.stdin is not None
        if not self._end and not self._process.stdin.is_closing():
            self._process.stdin.write(frame(Call(number, CANCEL, [])))

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


MOST_PLACES = 1024
CANCEL_S = 10.0
"""A call that is cancelled at its deadline may take so long to end, before its process is killed."""
log = logging.getLogger(__name__)


class Host:
    """One place for a process, which is started anew whenever it was lost."""

    def __init__(self, program: Program, most_places: int = MOST_PLACES) -> None:
        self._program = program
        self._most_places = most_places
        self._starting = asyncio.Lock()
        self._process: HostProcess | None = None
        self.calls = 0
        """The number of calls that run in it or wait for it."""

    async def start(self) -> HostProcess:
        """Return the running process, started if need be. Raises ConfigError, UserCodeError."""
        async with self._starting:
            if self._process is None or self._process.is_lost:
                self._process = await HostProcess.start(self._program, self._most_places)
            return self._process

    async def call(self, method: str, arguments: list[Any], deadline_s: float, grace_s: float = 0.0) -> Any:
        """Calls as HostProcess.call does. The deadline begins when a running process has a place for the call."""
        self.calls += 1
        try:
            while True:
                process = await self.start()
                async with process.places:
                    if not process.is_lost:
                        return await process.call(method, arguments, deadline_s, grace_s)
        finally:
            self.calls -= 1

    async def close(self, last_call: str = "", deadline_s: float = END_S) -> None:
        """Kill the process, after a last call of this method, if it is given one, which may free what it holds."""
        if self._process is not None:
            if last_call and not self._process.is_lost:
                try:
                    await self._process.call(last_call, [], deadline_s)
                except UserCodeError as error:
                    log.warning("%s: closing it %s", self._program.name, error)
            await self._process.lose("was closed")
            self._process = None


class HostPool:
    """Hosts of one program: some for many calls at once, and one in which lost calls are made again, one by one.

    So a call that hangs interrupts others only once, and in the end that call alone fails.
    """

    def __init__(self, program: Program, *, processes: int = 1) -> None:
        self._program = program
        self._shared = [Host(program) for _ in range(processes)]
        self._alone = Host(program, most_places=1)
        self._warming: asyncio.Future[list[Any]] | None = None
        self._is_closed = False
        self.repeated = 0
        """Calls that had to be made once more."""

    async def open(self) -> None:
        """Start the hosts to which calls go first, so that no call waits for an import.

        Raises ConfigError, UserCodeError."""
        await asyncio.gather(*(host.start() for host in self._shared))

    def warm(self) -> None:
        """Begin to start the hosts to which calls go first. It does not wait: a call waits for its host, and raises
        what starting it raises."""
        self._warming = asyncio.gather(*(host.start() for host in self._shared), return_exceptions=True)

    async def call(
        self, method: str, *arguments: Any, deadline_s: float, on_lost: Callable[[], None] | None = None
    ) -> Any:
        """Returns the result of a method that is called at most twice. Raises UserCodeError, which says how the last
        call ended.

        With `on_lost` only a call whose process was lost is made again, up to twice, each time once that has been
        called: beside others first, and then alone. It is cancelled at its deadline, and its process killed only if it
        does not end then.
        """
        tries = 2 if on_lost is not None else 1
        for _ in range(tries):
            host = min(self._shared, key=lambda host: host.calls)
            try:
                return await host.call(method, list(arguments), deadline_s, CANCEL_S if on_lost else 0.0)
            except RefusedError:
                raise
            except UserCodeError as error:
                if self._is_closed or (on_lost is not None and not isinstance(error, HostLostError)):
                    raise
                log.warning("%s: a call, or another one beside it, %s; it is made once more", self._program.name, error)
            self.repeated += 1
            if on_lost is not None:
                on_lost()
        return await self._alone.call(method, list(arguments), deadline_s, CANCEL_S if on_lost else 0.0)

    async def close(self, last_call: str = "", deadline_s: float = END_S) -> None:
        """Kill all hosts, each after its last call. Idempotent; a later call would start them again."""
        self._is_closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)  # reads what it ends with
        await asyncio.gather(*(host.close(last_call, deadline_s) for host in (*self._shared, self._alone)))


T = TypeVar("T")


class BlockingHost:
    """A host of one program. It ends when this object is deleted, or this process ends."""

    def __init__(self, program: Program, *, deadline_s: float) -> None:
        """Start the host. Raises ConfigError, UserCodeError."""
        self._program = program
        self._deadline_s = deadline_s
        self._host = Host(program, most_places=1)
        self._loop = asyncio.new_event_loop()
        thread = Thread(target=_serve, args=(self._loop, self._host), name=program.name, daemon=True)
        thread.start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        self._run(self._host.start())

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns the method's result. Raises UserCodeError."""
        try:
            return self._run(self._host.call(method, list(arguments), self._deadline_s))
        except UserCodeError as error:
            asked = f"{method}({', '.join(map(repr, arguments))})"
            raise UserCodeError(f"{self._program.name}: {asked} {error}.") from error

    def call_again(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a method that may be repeated: where its process was lost, it is called once more in a
        new one."""
        try:
            return self.call(method, *arguments)
        except UserCodeError as error:
            log.warning("%s It is called once more.", error)
        return self.call(method, *arguments)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Run the loop until it is stopped, and then close the host."""
    loop.run_forever()
    loop.run_until_complete(host.close())
    loop.close()
