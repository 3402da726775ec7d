"""The messages between a process and its host of user code: frames of msgpack after their length, never pickled."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")
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
    """One call of a method. The answer has the same `number`."""

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
