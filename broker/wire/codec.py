"""Wire structs <-> frames.

Most bodies of frames are msgpack. Those of trajectories, segments and requests for scores are a msgpack envelope around
raw little-endian buffers, because lists of numbers in msgpack are a hundred times slower: tokens (prompt, then
response) as a plane of low 16 bits and a plane of high bytes under zstd level 1, fp32 logprobs as they are (they do not
compress), the loss mask as bits, a teacher's logprobs if there is one, its candidates in each place and their logprobs
if it was asked for some, and where routers are replayed the chosen experts, under zstd too. Decoding any bytes ends in
a value or a FrameError.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.broker.config import MAX_TOKENS
from headway.broker.errors import FrameError
from headway.broker.schema import ScoreRequest, Segment, Trajectory, TrajectoryId, Turn, VersionSpan

from .buffers import ExpertsHead, pack_experts, pack_tokens, unpack_experts, unpack_tokens
from .checks import MAX_CANDIDATES, check_mask, check_parts, check_score_request, check_segment, check_tokens
from .frames import (
    ENVELOPE_LENGTH,
    KINDS,
    SCORE_REQUEST,
    SEGMENT,
    TRAJECTORY,
    T,
    frame_of,
    open_enveloped,
    open_frame,
    unpack,
)


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
