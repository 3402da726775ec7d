"""Wire structs <-> frames.

Most bodies of frames are msgpack. Those of trajectories, segments and requests for scores are a msgpack envelope around
raw little-endian buffers, because lists of numbers in msgpack are a hundred times slower: tokens (prompt, then
response) as a plane of low 16 bits and a plane of high bytes under zstd level 1, fp32 logprobs as they are (they do not
compress), the loss mask as bits, a teacher's logprobs if there is one, its candidates in each place and their logprobs
if it was asked for some, and where routers are replayed the chosen experts, under zstd too. Decoding any bytes ends in
a value or a FrameError.

A frame is: magic, schema number, kind, crc32 of these two and the body, length, body. An enveloped body is the length
of a msgpack envelope, the envelope, and raw buffers.
"""

import struct
import zlib
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.broker.config import MAX_TOKENS
from headway.broker.errors import DamagedFrameError, FrameError, SchemaMismatchError
from headway.broker.schema import (
    SCHEMA_VERSION,
    Prompt,
    RunRules,
    ScoreRequest,
    Segment,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
    WeightVersion,
)
from headway.broker.schema.status import PoolInfo, RunStatus, ScorerInfo, WorkerInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.schema.weights import BroadcastGroup, ModelFiles, Probe, WeightManifest

from .buffers import ExpertsHead, pack_experts, pack_tokens, unpack_experts, unpack_tokens
from .checks import MAX_CANDIDATES, check_mask, check_parts, check_score_request, check_segment, check_tokens

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


class _SegmentEnvelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tid: TrajectoryId
    identity: str
    worker: str
    index: int
    start: int
    length: int
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    experts: ExpertsHead | None
    token_bytes: int
    """The bytes of the compressed planes."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tid: TrajectoryId
    identity: str
    prompt_length: int
    response_length: int
    spans: tuple[VersionSpan, ...]
    reward: float
    rewards: dict[str, float]
    turns: tuple[Turn, ...]
    finish_reason: Literal["stop", "length"]
    worker: str
    has_teacher: bool
    candidates: int
    """The teacher's candidates in each place."""
    experts: ExpertsHead | None
    token_bytes: int
    """The bytes of the compressed planes."""


class _ScoreEnvelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    identity: str
    prompt_length: int
    response_length: int
    temperature: float
    top_k: int
    token_bytes: int
    """The bytes of the compressed planes."""


def encode(value: msgspec.Struct) -> bytes:
    """Return the frame of any wire struct but a trajectory or a segment."""
    return frame_of(KINDS[type(value)], msgspec.msgpack.encode(value))


def decode(frame: bytes, kind: type[T]) -> T:
    """Return the struct in the frame, which must be of this kind. Raises FrameError."""
    return unpack(open_frame(frame, KINDS[kind], kind.__name__), kind)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Return the trajectory's frame. Raises FrameError where its parts contradict each other."""
    check_parts(trajectory)
    check_mask(trajectory.tid, trajectory.loss_mask)
    sequence = np.concatenate((trajectory.prompt_tokens, trajectory.response_tokens))
    check_tokens(trajectory.tid, sequence)
    tokens = pack_tokens(sequence)
    experts_head, experts = pack_experts(trajectory.experts)
    envelope = msgspec.msgpack.encode(
        _Envelope(
            trajectory.tid,
            trajectory.identity,
            len(trajectory.prompt_tokens),
            len(trajectory.response_tokens),
            trajectory.spans,
            trajectory.reward,
            trajectory.rewards,
            trajectory.turns,
            trajectory.finish_reason,
            trajectory.worker,
            trajectory.teacher_logprobs is not None,
            0 if trajectory.candidate_tokens is None else trajectory.candidate_tokens.shape[1],
            experts_head,
            len(tokens),
        )
    )
    taught = (
        _bytes_of(trajectory.teacher_logprobs, "<f4"),
        _bytes_of(trajectory.candidate_tokens, "<i4"),
        _bytes_of(trajectory.candidate_logprobs, "<f4"),
    )
    return enveloped(TRAJECTORY, envelope, tokens, trajectory, *taught, experts)


def decode_trajectory(frame: bytes) -> Trajectory:
    """Return the trajectory in the frame, checked; its arrays do not share the frame's memory. Raises FrameError."""
    envelope, rest = open_enveloped(frame, TRAJECTORY, "Trajectory", _Envelope)
    length, total = envelope.response_length, envelope.prompt_length + envelope.response_length
    if min(envelope.prompt_length, length) < 0:
        raise FrameError(f"{envelope.tid}: a negative length")
    rest, experts = _cut_experts(rest, envelope.tid, envelope.experts)
    rest, candidate_tokens, candidate_logprobs = _cut_candidates(rest, envelope.tid, length, envelope.candidates)
    rest, teacher_logprobs = _cut_teacher(rest, envelope.tid, length if envelope.has_teacher else None)
    tokens, logprobs, mask = _cut(rest, envelope.tid, total, length, envelope.token_bytes)
    trajectory = Trajectory(
        tid=envelope.tid,
        identity=envelope.identity,
        prompt_tokens=tokens[: envelope.prompt_length],
        response_tokens=tokens[envelope.prompt_length :],
        behavior_logprobs=logprobs,
        loss_mask=mask,
        spans=envelope.spans,
        reward=envelope.reward,
        rewards=envelope.rewards,
        turns=envelope.turns,
        finish_reason=envelope.finish_reason,
        worker=envelope.worker,
        experts=unpack_experts(envelope.experts, experts),
        teacher_logprobs=teacher_logprobs,
        candidate_tokens=candidate_tokens,
        candidate_logprobs=candidate_logprobs,
    )
    check_parts(trajectory)  # planes of three bytes and bits hold no other tokens and masks than allowed ones
    return trajectory


def encode_segment(segment: Segment) -> bytes:
    """Return the segment's frame. Raises FrameError where its parts contradict each other."""
    check_segment(segment)
    tokens = pack_tokens(segment.tokens)
    experts_head, experts = pack_experts(segment.experts)
    envelope = msgspec.msgpack.encode(
        _SegmentEnvelope(
            segment.tid,
            segment.identity,
            segment.worker,
            segment.index,
            segment.start,
            len(segment.tokens),
            segment.spans,
            segment.turns,
            experts_head,
            len(tokens),
        )
    )
    return enveloped(SEGMENT, envelope, tokens, segment, experts)


def decode_segment(frame: bytes) -> Segment:
    """Return the segment in the frame, checked; its arrays do not share the frame's memory. Raises FrameError."""
    envelope, rest = open_enveloped(frame, SEGMENT, "Segment", _SegmentEnvelope)
    length = envelope.length
    if length < 0:
        raise FrameError(f"{envelope.tid}: a negative length")
    rest, experts = _cut_experts(rest, envelope.tid, envelope.experts)
    tokens, logprobs, mask = _cut(rest, envelope.tid, length, length, envelope.token_bytes)
    segment = Segment(
        tid=envelope.tid,
        identity=envelope.identity,
        worker=envelope.worker,
        index=envelope.index,
        start=envelope.start,
        tokens=tokens,
        behavior_logprobs=logprobs,
        loss_mask=mask,
        spans=envelope.spans,
        turns=envelope.turns,
        experts=unpack_experts(envelope.experts, experts),
    )
    check_segment(segment)
    return segment


def encode_score_request(request: ScoreRequest) -> bytes:
    """Return the request's frame. Raises FrameError where it has no tokens, or impossible ones."""
    check_score_request(request)
    lengths = len(request.prompt_tokens), len(request.response_tokens)
    tokens = pack_tokens(request.prompt_tokens, request.response_tokens)
    envelope = msgspec.msgpack.encode(
        _ScoreEnvelope(request.identity, *lengths, request.temperature, request.top_k, len(tokens))
    )
    return frame_of(SCORE_REQUEST, ENVELOPE_LENGTH.pack(len(envelope)), envelope, tokens)


def decode_score_request(frame: bytes) -> ScoreRequest:
    """Return the request in the frame, checked. Raises FrameError."""
    envelope, rest = open_enveloped(frame, SCORE_REQUEST, "ScoreRequest", _ScoreEnvelope)
    start, total = envelope.prompt_length, envelope.prompt_length + envelope.response_length
    if min(start, envelope.response_length) < 0 or total > MAX_TOKENS or len(rest) != envelope.token_bytes:
        raise FrameError(f"a request for scores of {total} tokens; at most {MAX_TOKENS} are allowed")
    tokens = unpack_tokens(rest, total)
    request = ScoreRequest(
        identity=envelope.identity,
        prompt_tokens=tokens[:start],
        response_tokens=tokens[start:],
        temperature=envelope.temperature,
        top_k=envelope.top_k,
    )
    check_score_request(request)
    return request


def enveloped(kind: int, envelope: bytes, tokens: bytes, sampled: Trajectory | Segment, *others: bytes) -> bytes:
    """Return the frame; the inverse of `open_enveloped` and `_cut`. `others` are the buffers after the loss mask."""
    mask = np.packbits(sampled.loss_mask).tobytes()
    size = ENVELOPE_LENGTH.pack(len(envelope))
    return frame_of(kind, size, envelope, tokens, _bytes_of(sampled.behavior_logprobs, "<f4"), mask, *others)


def _bytes_of(values: NDArray[np.float32] | NDArray[np.int32] | None, dtype: Literal["<f4", "<i4"]) -> bytes:
    return b"" if values is None else values.astype(dtype, copy=False).tobytes()


def _cut_experts(rest: memoryview, tid: TrajectoryId, head: ExpertsHead | None) -> tuple[memoryview, memoryview]:
    """Return the buffers before the compressed experts, and the experts."""
    size = head.compressed_bytes if head else 0
    if size > len(rest):
        raise FrameError(f"{tid}: {len(rest)} bytes of buffers, {size} of them experts")
    return rest[: len(rest) - size], rest[len(rest) - size :]


def _cut_teacher(
    rest: memoryview, tid: TrajectoryId, length: int | None
) -> tuple[memoryview, NDArray[np.float32] | None]:
    """Return the buffers before the teacher's logprobs, and those; `length` None: there are none."""
    if length is None:
        return rest, None
    at = len(rest) - 4 * length
    if at < 0:
        raise FrameError(f"{tid}: {len(rest)} bytes of buffers do not fit {length} logprobs of a teacher")
    return rest[:at], np.frombuffer(rest[at:], "<f4").astype(np.float32)


def _cut_candidates(
    rest: memoryview, tid: TrajectoryId, length: int, count: int
) -> tuple[memoryview, NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Return the buffers before the candidates of a teacher, and the `count` of each place with their logprobs."""
    if not count:
        return rest, None, None
    size = 4 * length * count
    if not 0 < count <= MAX_CANDIDATES or 2 * size > len(rest):
        raise FrameError(f"{tid}: {len(rest)} bytes of buffers do not fit {count} candidates of {length} tokens")
    at = len(rest) - 2 * size
    tokens, logprobs = np.frombuffer(rest[at : at + size], "<i4"), np.frombuffer(rest[at + size :], "<f4")
    shape = length, count
    return rest[:at], tokens.astype(np.int32).reshape(shape), logprobs.astype(np.float32).reshape(shape)


def _cut(
    rest: memoryview, tid: TrajectoryId, total: int, length: int, token_bytes: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
    """Return `total` tokens, `length` logprobs and a mask of `length`."""
    if min(length, token_bytes) < 0 or total > MAX_TOKENS:
        raise FrameError(f"{tid}: {total} tokens; at most {MAX_TOKENS} are allowed")
    if len(rest) != token_bytes + 4 * length + (length + 7) // 8:
        raise FrameError(f"{tid}: {len(rest)} bytes of buffers do not fit {length} response tokens")
    mask_at = token_bytes + 4 * length
    tokens = unpack_tokens(rest[:token_bytes], total)
    logprobs = np.frombuffer(rest[token_bytes:mask_at], "<f4").astype(np.float32)
    mask = np.unpackbits(np.frombuffer(rest[mask_at:], np.uint8), count=length)
    return tokens, logprobs, mask
