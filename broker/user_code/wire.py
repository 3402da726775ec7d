"""What a process and its host of user code say to each other: frames of msgpack behind their length, never pickled."""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 28


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a host opens: `factory`, a path in Headway's own code, called with `arguments`. What that returns has
    methods, whose arguments and results are plain data, and `places`, the number of calls that it takes at once."""

    name: str
    """What users call it, for errors: the path of their function."""
    factory: str
    arguments: dict[str, Any] = {}
    import_path: str
    open_s: float = 300.0
    """For importing what user code imports, such as torch, on a busy machine, and for the factory."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a method. `number` comes back with its answer."""

    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`raised` says why there is no `value`, such as `raised KeyError: 'x'`. Number 0 answers the program: places."""

    number: int
    raised: str | None = None
    is_refusal: bool = False
    """`raised` is a whole paragraph, of an error that is there again if the call is made again."""
    value: Any = None


def frame(message: msgspec.Struct) -> bytes:
    """As it is sent. Raises TypeError or another error of msgspec's for what is no plain data."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
