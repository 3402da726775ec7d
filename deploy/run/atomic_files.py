"""Writes files of a run whole or not at all: a disk that fills up during a write leaves the file as it was."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.broker.errors import HeadwayError
from headway.learner.disk import not_written, sync

UNFINISHED = ".part"
"""The ending of files that a process left when it was killed during a write."""


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal of `path` into a HeadwayError with the remedy."""
    try:
        yield
    except OSError as error:
        raise HeadwayError(not_written(path, error)) from error


def append_line(path: Path, line: bytes) -> None:
    """Append the line and its end, both or neither. Raises HeadwayError and leaves the file as it was.

    A process that is killed meanwhile may tear the line: a process that continues the file calls `cut_torn_line` first.
    """
    with write_errors(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            _write_all(file.fileno(), line + b"\n")
        except OSError:
            file.truncate(before)
            raise


def cut_torn_line(path: Path) -> None:
    """Keep only the file's whole lines. Raises HeadwayError."""
    with write_errors(path):
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file durably. Raises HeadwayError and leaves the file as it was."""
    part = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with write_errors(path):
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
    """Write all of it: a disk that is nearly full takes a part, and raises only at the next write."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
