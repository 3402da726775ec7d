"""Files of a run, written whole or not at all: a disk that is full in mid-write leaves what was there before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from broker.errors import HeadwayError
from learner.checkpoints.checkpoint import sync
from learner.checkpoints.disk import not_written

UNFINISHED = ".part"
"""What a process that was killed in mid-write leaves has this ending."""


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system refuses of `path`, as a HeadwayError with the remedy."""
    try:
        yield
    except OSError as error:
        raise HeadwayError(not_written(path, error)) from error


def append_line(path: Path, line: bytes) -> None:
    """Add the line and its end, both or neither. Raises HeadwayError, with the file as it was.

    A process that is killed meanwhile may tear the line: `cut_torn_line` first, if another one goes on.
    """
    with told(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            _write_all(file.fileno(), line + b"\n")
        except OSError:
            file.truncate(before)
            raise


def cut_torn_line(path: Path) -> None:
    """Leave the file's whole lines. Raises HeadwayError."""
    with told(path):
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def replace_file(path: Path, content: bytes) -> None:
    """Durable when this returns. Raises HeadwayError, with the file as it was."""
    part = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with told(path):
            with part.open("wb", buffering=0) as file:
                _write_all(file.fileno(), content)
                os.fsync(file.fileno())
            part.replace(path)
            sync(path.parent)
    except HeadwayError:
        with suppress(OSError):
            part.unlink()
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    """All of it: a disk that is nearly full takes a part, and raises only when it is asked again."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
