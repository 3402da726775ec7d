"""A process for user code, `python -m headway.broker.user_code.host`: it reads a Program and Calls, and writes answers.

Calls run side by side, plain functions in threads, coroutines in the event loop. The process that started it watches
it, and kills it where a call runs past its deadline; it ends with that process. Messages are frames of msgpack after
their length, never pickled.
"""

import asyncio
import ctypes
import importlib
import os
import selectors
import signal
import struct
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, BinaryIO

import msgspec

from headway.broker.errors import HeadwayError

from .import_paths import place_of

LENGTH = struct.Struct(">I")
CANCEL = ""
MAX_FRAME_BYTES = 1 << 28


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program that a host opens: it calls `factory`, a path in Headway's own code, with `arguments`. The returned
    object has methods, whose arguments and results are plain data, and `places`, how many calls it takes at once."""

    name: str
    """The name for errors: the path of the user's function."""
    factory: str
    arguments: dict[str, Any] = {}
    import_path: str
    open_s: float = 300.0
    """The time to open it: imports of user code, such as torch, on a busy machine, and the call of the factory."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a method. The answer has the same `number`. The method CANCEL cancels the call of that number, if
    it is a coroutine; a thread runs on."""

    number: int
    method: str
    arguments: list[Any]


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call. `raised` says why there is no `value`, such as `raised KeyError: 'x'`. Number 0 answers the
    Program; its value is `places`."""

    number: int
    raised: str | None = None
    is_refusal: bool = False
    """Whether `raised` is a whole paragraph, of an error that would come again if the call were repeated."""
    value: Any = None


def frame(message: msgspec.Struct) -> bytes:
    """Return the message as it is sent. Raises TypeError or another error of msgspec's for values that are not plain
    data."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


PR_SET_PDEATHSIG = 1
MOST_OOM_SCORE = 1000
MOST_WORDS = 1000
"""The most characters of an error of user code in an answer; the log has more of it."""
MOST_REFUSAL = 10_000
"""The most characters of one of Headway's own errors in an answer, and of a line of a traceback in the log."""


def main() -> None:
    """Serve until the input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _end_first_without_memory()
    loop = asyncio.SelectorEventLoop(_OwnSelector())
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_serve(*_channels()))
    except SystemExit as error:  # of a task that user code has made
        code = error.code
    except BaseException as error:  # noqa: BLE001 - as the interpreter would end
        _print(error)
        code = 1
    # No call that still runs is cancelled: it would be told as its own failure.
    os._exit(code if isinstance(code, int) else code is not None)


def _end_first_without_memory() -> None:
    """Have the kernel end this process, and those that it starts, before its caller, where memory is short."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(MOST_OOM_SCORE))


class _OwnSelector(selectors.DefaultSelector):
    """Keeps copies of this process that user code has forked away from its connections, whose answers they would read
    in its place, and ends those that go on as if they were this process."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._cut_off)

    def _cut_off(self) -> None:
        with open(os.devnull, "r+b") as nothing:
            for descriptor in (*(key.fd for key in self.get_map().values()), self.fileno()):
                os.dup2(nothing.fileno(), descriptor, inheritable=False)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector."""
        if os.getpid() != self._process:
            os._exit(1)
        return super().select(timeout)


def _channels() -> tuple[BinaryIO, BinaryIO]:
    """Returns the channels of calls and answers, which no process of user code inherits; its output goes to stderr."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for channel in (calls, answers):
        os.register_at_fork(after_in_child=channel.close)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return calls, answers


async def _serve(calls: BinaryIO, answers: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
    program = msgspec.msgpack.decode(await _read(reader), type=Program)
    try:
        opened = _open(program)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - every error of opening it is an answer
        is_told = isinstance(error, HeadwayError)  # its message is a whole paragraph
        if not is_told:
            _print(error)
        words = _words(error) if is_told else f"{program.name}: opening it {_words(error)}."
        _say(answers, frame(CallAnswer(0, raised=words)))
        os._exit(1)
    _say(answers, frame(CallAnswer(0, value=opened.places)))
    threads = ThreadPoolExecutor(opened.places)
    running: dict[int, asyncio.Task[None]] = {}
    while True:
        call = msgspec.msgpack.decode(await _read(reader), type=Call)
        if call.method == CANCEL:
            if call.number in running:
                running[call.number].cancel()
            continue
        running[call.number] = task = asyncio.create_task(_answer(opened, call, threads, answers))
        task.add_done_callback(partial(_forget, running, call.number, answers))


def _forget(running: dict[int, asyncio.Task[None]], number: int, answers: BinaryIO, task: asyncio.Task[None]) -> None:
    del running[number]
    if task.cancelled():  # before it began: its caller waits for an answer all the same
        _say(answers, frame(_cancelled(number)))


def _cancelled(number: int) -> CallAnswer:
    return CallAnswer(number, raised="was cancelled")


def _open(program: Program) -> Any:
    sys.path.append(program.import_path)
    module, _, name = program.factory.partition(":")
    return getattr(importlib.import_module(module), name)(**program.arguments)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        os._exit(0)  # no caller waits for the calls that still run


async def _answer(program: Any, call: Call, threads: ThreadPoolExecutor, answers: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    try:
        method = getattr(program, call.method)
        result = await loop.run_in_executor(threads, _called, method, call.arguments)
        answer = frame(CallAnswer(call.number, value=await result if isawaitable(result) else result))
    except asyncio.CancelledError:
        answer = frame(_cancelled(call.number))
    except BaseException as error:  # noqa: BLE001 - every error of user code is an answer
        is_refusal = isinstance(error, HeadwayError)
        if not is_refusal:
            _print(error)
        answer = frame(CallAnswer(call.number, raised=_words(error), is_refusal=is_refusal))
    _say(answers, answer)


def _called(method: Any, arguments: list[Any]) -> Any:
    try:
        return method(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise _ExitedError(_words(error)) from error  # as it is, it would end the thread or the event loop


class _ExitedError(Exception):
    """A function in a thread has called sys.exit, or raised another error that would end the process."""


def _print(error: BaseException) -> None:
    """Write the traceback, with long lines cut: a message may be as long as what the function was given."""
    for line in traceback.format_exception(error):
        sys.stderr.write(line if len(line) <= MOST_REFUSAL else f"{line[:MOST_REFUSAL]}...\n")


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"[:MOST_WORDS]
    if isinstance(error, (_ExitedError, HeadwayError)):
        return str(error)[:MOST_REFUSAL]
    try:
        said = f"raised {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - of its own method
        said = f"raised {type(error).__name__}, which raises another error when it is told"
    return said[:MOST_WORDS] + place_of(error)


def _say(answers: BinaryIO, message: bytes) -> None:
    answers.write(message)
    answers.flush()


if __name__ == "__main__":
    main()
