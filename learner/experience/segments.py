"""The experience log has segments, files of a stated size, to which batches are appended, one record a step.

    steps_FIRST.log    records of ascending steps from FIRST on: MAGIC, step, length, a checksum of these, and the batch
    step_K.zst         the batch of step K alone, as older versions of Headway wrote them; they are read, not written

A record's header is written once its batch is whole, so what a crash tore has none: it lies behind the last record, and
the learner cuts it off before it appends. A damaged header in the midst of a file costs the records up to the next one.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from headway.learner.checkpoints.disk import sync

MAGIC = b"HWXP"
_HEADER = struct.Struct("<4sQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_SCAN_BYTES = 1 << 20


@dataclass(frozen=True)
class BatchPlace:
    """The bytes of one batch in a file."""

    path: Path
    start: int
    length: int


@dataclass
class LogSegment:
    """One file, and the steps whose batches it holds, ascending."""

    path: Path
    places: dict[int, BatchPlace] = field(default_factory=dict)
    end: int = 0
    """The place at which the next record begins: all that lies behind is torn."""
    size: int = 0
    """The file's size in bytes."""

    @property
    def first(self) -> int:
        """The step in its name."""
        return _first_of(self.path)

    @property
    def last(self) -> int:
        """The last step whose batch it holds, or -1."""
        return next(reversed(self.places), -1)

    @property
    def is_appendable(self) -> bool:
        """False for the file of a single step."""
        return self.path.suffix == ".log"

    def append(self, step: int, write: Callable[[BinaryIO], None]) -> None:
        """Adds the batch that `write` writes, durably, in place of what was torn. After an error the file is as it
        was before."""
        is_new = not self.path.exists()
        try:
            with self.path.open("w+b" if is_new else "r+b") as file:
                file.truncate(self.end)
                start = file.seek(self.end + HEADER_BYTES)
                write(file)
                length = file.tell() - start
                file.seek(self.end)
                file.write(_header(step, length))
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self.path.parent)
        except BaseException:
            self._undo(is_new)
            raise
        self.places[step] = BatchPlace(self.path, start, length)
        self.end = self.size = start + length

    def cut(self, step: int) -> None:
        """Removes the records of `step` and later ones; the file goes with its last one."""
        if self.places and self.last < step:
            return
        gone = [place for held, place in self.places.items() if held >= step]
        self.places = {held: place for held, place in self.places.items() if held < step}
        if not self.places and (gone or step <= self.first):
            self.remove()
        elif gone:
            self.end = self.size = min(place.start for place in gone) - HEADER_BYTES
            with suppress(OSError), self.path.open("r+b") as file:
                file.truncate(self.end)
                os.fsync(file.fileno())

    def remove(self) -> None:
        """Deletes the file."""
        self.places, self.end, self.size = {}, 0, 0
        with suppress(OSError):
            self.path.unlink()

    def _undo(self, is_new: bool) -> None:
        with suppress(OSError):
            if is_new:
                self.path.unlink()
            else:
                os.truncate(self.path, self.end)


def segments_in(directory: Path) -> list[LogSegment]:
    """Returns the log's files with the places of their batches, by their first steps; unreadable ones count as empty.

    Nothing is changed: a reader may look while the learner appends.
    """
    return [read_segment(path) for path in files_in(directory)]


def files_in(directory: Path) -> list[Path]:
    """Returns the log's files by their first steps; other files are none of its."""
    paths = [*directory.glob("steps_*.log"), *directory.glob("step_*.zst")]
    return sorted((path for path in paths if _first_of(path) >= 0), key=_first_of)


def read_segment(path: Path) -> LogSegment:
    """Returns the places of the batches of one file, whose own bytes are read only when a batch is."""
    segment = LogSegment(path)
    with suppress(OSError), path.open("rb") as file:
        segment.size = os.fstat(file.fileno()).st_size
        if not segment.is_appendable:
            segment.places, segment.end = {segment.first: BatchPlace(path, 0, segment.size)}, segment.size
            return segment
        for step, place in _records(path, file, segment.size):
            if step <= segment.last:  # the branch before was abandoned
                segment.places = {held: known for held, known in segment.places.items() if held < step}
            segment.places[step] = place
            segment.end = place.start + place.length
    return segment


@contextmanager
def open_batch(place: BatchPlace) -> Iterator[BinaryIO]:
    """Opens the bytes of one batch to be read."""
    with place.path.open("rb") as file:
        file.seek(place.start)
        yield _BoundedReader(file, place.length)  # type: ignore[misc]


class _BoundedReader:
    """Reads no further than the end of a record."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file, self._left = file, length

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _first_of(path: Path) -> int:
    """Returns the step in the file's name, or -1 where the log did not write the file."""
    step = path.stem.partition("_")[2]
    return int(step) if step.isdecimal() else -1


def _header(step: int, length: int) -> bytes:
    header = _HEADER.pack(MAGIC, step, length)
    return header + _CRC.pack(crc32(header))


def _records(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, BatchPlace]]:
    at = 0
    while (found := _next_header(file, at, size)) is not None:
        at, step, length = found
        yield step, BatchPlace(path, at + HEADER_BYTES, length)
        at += HEADER_BYTES + length


def _next_header(file: BinaryIO, at: int, size: int) -> tuple[int, int, int] | None:
    """Returns (where, step, length) of the next sound header of a whole record from `at` on; None where there is
    none."""
    while at + HEADER_BYTES <= size:
        file.seek(at)
        header = file.read(HEADER_BYTES)
        if len(header) == HEADER_BYTES and header[:4] == MAGIC and _CRC.pack(crc32(header[:-4])) == header[-4:]:
            _, step, length = _HEADER.unpack(header[:-4])
            if at + HEADER_BYTES + length <= size:
                return at, step, length
        at = _find_magic(file, at + 1, size)
    return None


def _find_magic(file: BinaryIO, at: int, size: int) -> int:
    """Returns where the next MAGIC lies from `at` on, or `size`."""
    while at < size:
        file.seek(at)
        part = file.read(_SCAN_BYTES)
        if (found := part.find(MAGIC)) >= 0:
            return at + found
        if len(part) < _SCAN_BYTES:
            break
        at += len(part) - len(MAGIC) + 1
    return size
