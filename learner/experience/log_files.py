"""The experience log has segments, files of a stated size, to which batches are appended, one record a step.

    steps_FIRST.log    records of ascending steps from FIRST on: MAGIC, step, length, a checksum of these, and the batch
    step_K.zst         the batch of step K alone, as older versions of Headway wrote them; they are read, not written

A record's header is written once its batch is whole, so what a crash tore has none: it lies behind the last record, and
the learner cuts it off before it appends. A damaged header in the midst of a file costs the records up to the next one.

A batch is, under zstd, a BatchHeader, then its groups as the broker's frames, each with its length. Whatever the bytes
are, reading ends in the batch as it was written or in a LoggedBatchError.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from zlib import crc32

import msgspec
import zstandard

from headway.broker.errors import FrameError, HeadwayError
from headway.broker.schema import Group, Prompt, TrajectoryId
from headway.broker.wire.codec import decode, decode_trajectory, encode, encode_trajectory
from headway.learner.disk import sync

if TYPE_CHECKING:
    from headway.learner.ranks import Ranks


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
                file.write(_record_header(step, length))
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
        for step, place in _records_in(path, file, segment.size):
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


def _record_header(step: int, length: int) -> bytes:
    header = _HEADER.pack(MAGIC, step, length)
    return header + _CRC.pack(crc32(header))


def _records_in(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, BatchPlace]]:
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


class GroupFrames(msgspec.Struct, frozen=True, array_like=True):
    """A group as it travels between ranks and lies in the experience log."""

    prompt: bytes
    round: int
    trajectories: tuple[bytes, ...]

    @classmethod
    def of(cls, group: Group) -> "GroupFrames":
        return cls(encode(group.prompt), group.round, tuple(encode_trajectory(t) for t in group.trajectories))

    def check_schema(self) -> None:
        """Raises FrameError where another version of Headway wrote the group; all its frames are of one version."""
        for frame in self.trajectories[:1]:
            decode_trajectory(frame)
        decode(self.prompt, Prompt)

    def group(self) -> Group:
        """Decodes the group. Raises FrameError for a damaged frame."""
        trajectories = tuple(decode_trajectory(frame) for frame in self.trajectories)
        return Group(prompt=decode(self.prompt, Prompt), round=self.round, trajectories=trajectories)


def share_groups(ranks: "Ranks", groups: Sequence[Group] | None) -> list[Group]:
    """Returns rank 0's groups on every rank; None arrives as an empty list. Collective."""
    if ranks.world_size == 1:
        return list(groups or ())
    frames = [GroupFrames.of(group) for group in groups or ()]
    received = ranks.share_bytes(msgspec.msgpack.encode(frames))
    return [frames.group() for frames in msgspec.msgpack.decode(received, type=list[GroupFrames])]


FORMAT = 1
MAX_RECORD_BYTES = 1 << 30
"""The largest size of one group: a damaged length cannot make a reader ask for more memory."""
ZSTD_LEVEL = 1
"""Tokens are compressed already and logprobs hardly can be."""

_LENGTH = struct.Struct("<I")
_DAMAGE = (
    OSError,
    zstandard.ZstdError,
    FrameError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
    OverflowError,
)


class LoggedBatchError(HeadwayError):
    """The bytes are not what was written, or the batch cannot be written."""


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header lists what follows, so that a reader never takes a part of it for the whole."""

    format: int
    identity: str = ""
    """The run's identity; empty in batches from before runs had one."""
    step: int
    groups: int
    tids: tuple[TrajectoryId, ...]
    """The ids of all trajectories, in order."""


def tids_of(groups: Sequence[Group]) -> tuple[TrajectoryId, ...]:
    """Returns the ids of all trajectories, in order."""
    return tuple(trajectory.tid for group in groups for trajectory in group.trajectories)


def write_batch(file: BinaryIO, identity: str, step: int, groups: Sequence[Group]) -> None:
    """Writes the batch from where the file stands. Raises OSError, LoggedBatchError."""
    header = BatchHeader(format=FORMAT, identity=identity, step=step, groups=len(groups), tids=tids_of(groups))
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    with compressor.stream_writer(file, closefd=False) as stream:
        for record in (header, *map(GroupFrames.of, groups)):
            encoded = msgspec.msgpack.encode(record)
            if len(encoded) > MAX_RECORD_BYTES:
                raise LoggedBatchError(f"a group of {len(encoded)} bytes; at most {MAX_RECORD_BYTES} can be logged")
            stream.write(_LENGTH.pack(len(encoded)))
            stream.write(encoded)


def read_header(place: BatchPlace, identity: str, step: int) -> BatchHeader:
    """Raises LoggedBatchError where the bytes do not begin like this run's batch of `step`."""
    with _opened(place, step) as stream:
        return _header(stream, identity, step)


def check_batch(place: BatchPlace, identity: str, step: int) -> None:
    """Reads the whole batch and checks its checksum, its counts and the schema of its frames.

    Raises LoggedBatchError unless `read_batch` would give it.
    """
    with _opened(place, step) as stream:
        for record in _records(stream, _header(stream, identity, step).groups):
            msgspec.msgpack.decode(record, type=GroupFrames).check_schema()


def read_batch(place: BatchPlace, identity: str, step: int) -> list[Group]:
    """Returns the groups in the order trained. Raises LoggedBatchError unless every byte is as it was written."""
    with _opened(place, step) as stream:
        header = _header(stream, identity, step)
        frames = (msgspec.msgpack.decode(record, type=GroupFrames) for record in _records(stream, header.groups))
        groups = [one.group() for one in frames]
        if tids_of(groups) != header.tids:
            raise FrameError("its trajectories are not those that its header names")
        return groups


def read_first_groups(place: BatchPlace, identity: str, step: int, most: int) -> list[Group]:
    """Returns the first `most` groups and decodes no others, which takes a fraction of the time of `read_batch`.

    Raises LoggedBatchError unless every byte of the whole batch is as it was written.
    """
    with _opened(place, step) as stream:
        header = _header(stream, identity, step)
        records = _records(stream, header.groups)
        groups = [msgspec.msgpack.decode(record, type=GroupFrames).group() for record in islice(records, most)]
        tids = tids_of(groups)
        if tids != header.tids[: len(tids)]:
            raise FrameError("its trajectories are not those that its header names")
        deque(records, maxlen=0)  # the checksum stands at the end
        return groups


@contextmanager
def _opened(place: BatchPlace, step: int) -> Iterator[BinaryIO]:
    try:
        with open_batch(place) as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            yield stream
    except _DAMAGE as error:
        raise LoggedBatchError(
            f"{place.path}: the batch of step {step} is damaged ({error}) and counts as not logged."
        ) from error


def _header(stream: BinaryIO, identity: str, step: int) -> BatchHeader:
    header = msgspec.msgpack.decode(_record(stream), type=BatchHeader)
    if (header.format, header.step) != (FORMAT, step):
        raise FrameError(f"format {header.format}, step {header.step}; format {FORMAT}, step {step} are expected")
    if identity and header.identity not in ("", identity):
        raise FrameError(f"a batch of run {header.identity}, this is run {identity}")
    return header


def _records(stream: BinaryIO, count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield _record(stream)
    if stream.read(1):  # this also makes zstd compare its checksum
        raise FrameError("it goes on after its last group")


def _record(stream: BinaryIO) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if size > MAX_RECORD_BYTES:
        raise FrameError(f"a record of {size} bytes; at most {MAX_RECORD_BYTES} are allowed")
    return _exactly(stream, size)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise FrameError(f"it ends {size - len(data)} bytes early")
    return data
