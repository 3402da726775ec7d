"""One batch as bytes of a file: under zstd a BatchHeader, then its groups as the broker's frames, each with its length.

Whatever the bytes are, reading ends in the batch as it was written or in a LoggedBatchError.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import zstandard

from headway.broker.errors import FrameError, HeadwayError
from headway.broker.schema import Group, Prompt, TrajectoryId
from headway.broker.wire.codec import decode, decode_trajectory, encode, encode_trajectory

from .segments import BatchPlace, open_batch

if TYPE_CHECKING:
    from headway.learner.ranks import Ranks


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
