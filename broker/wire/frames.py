"""A frame: its header, the number of each kind, and what it says before its bytes are trusted.

A frame is: magic, schema number, kind, crc32 of these two and the body, length, body. An enveloped body is the length
of a msgpack envelope, the envelope, and raw buffers. Opening any bytes ends in the body or in a FrameError.
"""

import struct
import zlib
from typing import TypeVar

import msgspec

from headway.broker.errors import DamagedFrameError, FrameError, SchemaMismatchError
from headway.broker.schema import SCHEMA_VERSION, Prompt, RunRules, WeightVersion
from headway.broker.schema.metrics import StepMetrics
from headway.broker.schema.processes import PoolInfo, ScorerInfo, WorkerInfo
from headway.broker.schema.status import RunStatus
from headway.broker.schema.weights import BroadcastGroup, ModelFiles, Probe, WeightManifest

MAGIC = b"HDWY"
MAX_FRAME_BYTES = 256 << 20

_HEADER = struct.Struct("<4sHHII")
ENVELOPE_LENGTH = struct.Struct("<I")
TRAJECTORY, SEGMENT, SCORE_REQUEST = 1, 12, 14
KINDS: dict[type, int] = {
    Prompt: 2,
    WeightManifest: 3,
    BroadcastGroup: 4,
    ModelFiles: 5,
    WorkerInfo: 6,
    StepMetrics: 7,
    RunStatus: 8,
    Probe: 9,
    RunRules: 10,
    WeightVersion: 11,
    PoolInfo: 13,
    ScorerInfo: 15,
}

_READABLE_SINCE: dict[int, int] = {KINDS[Prompt]: 7, KINDS[StepMetrics]: 7}
"""Kinds whose frames of an earlier schema number are read, each with the first such number. Their structs got
only fields with defaults since, and a run that a later version of Headway resumes finds them on its server. Frames of
all other kinds must have the present number."""

T = TypeVar("T", bound=msgspec.Struct)


def frame_of(kind: int, *parts: bytes) -> bytes:
    """Return the frame of this kind whose body is `parts`. Raises FrameError for a body that is too long."""
    length, crc = sum(map(len, parts)), _seed(SCHEMA_VERSION, kind)
    if length + _HEADER.size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((_HEADER.pack(MAGIC, SCHEMA_VERSION, kind, crc, length), *parts))


def _seed(schema: int, kind: int) -> int:
    """Return the checksum of the header's schema number and kind; magic and length are checked by themselves."""
    return schema << 16 | kind


def open_enveloped(frame: bytes, kind: int, name: str, envelope: type[T]) -> tuple[T, memoryview]:
    """Return the envelope, and the buffers after it."""
    body = open_frame(frame, kind, name)
    if len(body) < ENVELOPE_LENGTH.size:
        raise FrameError(f"a {name} frame without an envelope")
    (size,) = ENVELOPE_LENGTH.unpack_from(body)
    start = ENVELOPE_LENGTH.size + size
    return unpack(body[ENVELOPE_LENGTH.size : start], envelope), body[start:]


def open_frame(frame: bytes, expected: int, name: str) -> memoryview:
    """Return the body of the frame, which must be whole, of a readable schema and of the expected kind. Raises
    FrameError."""
    if not _HEADER.size <= len(frame) <= MAX_FRAME_BYTES:
        raise DamagedFrameError(f"a frame of {len(frame)} bytes; {_HEADER.size} to {MAX_FRAME_BYTES} are allowed")
    magic, schema, kind, crc, length = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise DamagedFrameError(f"no frame of ours: it begins with {magic!r}")
    body = memoryview(frame)[_HEADER.size :]
    if length != len(body):
        raise DamagedFrameError(f"a frame that says {length} bytes and has {len(body)}: truncated or overlong")
    if zlib.crc32(body, _seed(schema, kind)) != crc:
        raise DamagedFrameError(f"a frame of {len(frame)} bytes whose checksum does not match: corrupt")
    if (
        not _READABLE_SINCE.get(kind, SCHEMA_VERSION) <= schema <= SCHEMA_VERSION
    ):  # known only now: the checksum shows that the number is not damaged
        raise SchemaMismatchError(
            f"a frame of schema {schema}, this is schema {SCHEMA_VERSION}: run the same version of Headway everywhere"
        )
    if kind != expected:
        raise FrameError(f"a frame of kind {kind} where a {name} ({expected}) should be")
    return body


def unpack(body: memoryview, kind: type[T]) -> T:
    """Return the struct that the msgpack holds. Raises FrameError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise FrameError(f"a frame that holds no {kind.__name__}: {error}") from error
