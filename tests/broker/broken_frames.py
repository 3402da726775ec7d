"""Frames with damage: flipped, cut, spliced, with false lengths, zstd bombs among them.

Most have a right checksum, so that they reach the inner decoders. Everything is drawn from one `Random`, so the same
seed makes the same frames.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from headway.broker.config import MAX_TOKENS
from headway.broker.schema import (
    SCHEMA_VERSION,
    Prompt,
    RunRules,
    ScoreRequest,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from headway.broker.schema.status import AgentInfo, PoolInfo, QueueDepths, RunStatus, ScorerInfo, WorkerInfo
from headway.broker.schema.step_metrics import AgentFigures, LagFigures, StepMetrics
from headway.broker.schema.weights import BroadcastGroup, DeltaSpec, ModelFiles, Probe, TensorSpec, WeightManifest
from headway.broker.wire import codec

HEADER = struct.Struct("<4sHHII")
_NUMBERS = (
    -1,
    0,
    1,
    2,
    5,
    7,
    255,
    1 << 16,
    MAX_TOKENS - 6,
    MAX_TOKENS,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 64) - 1,
)
_MARKERS = (
    b"\x00\x01\x7f\x80\x81\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd6\xdb\xdc\xdd\xde\xdf\xff"
)
"""Bytes that mean something to msgpack: lengths, floats, extensions, maps."""


@dataclass(frozen=True)
class Subject:
    """One decoder, and valid frames for it."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    kind: int
    frames: tuple[bytes, ...]


@cache
def subjects() -> tuple[Subject, ...]:
    """Return all decoders that take bytes from the server."""
    structs = [_subject(kind, values) for kind, values in _structs().items()]
    trajectories = tuple(map(codec.encode_trajectory, _trajectories()))
    segments = tuple(map(codec.encode_segment, _segments()))
    requests = tuple(map(codec.encode_score_request, _score_requests()))
    return (
        Subject(codec.decode_trajectory, codec.encode_trajectory, _kind(trajectories[0]), trajectories),
        Subject(codec.decode_segment, codec.encode_segment, _kind(segments[0]), segments),
        Subject(codec.decode_score_request, codec.encode_score_request, _kind(requests[0]), requests),
        *structs,
    )


def broken_frame(chance: Random, subject: Subject) -> bytes:
    """Return a valid frame with damage; seldom nothing but noise."""
    shape = chance.random()
    if shape < 0.02:
        return chance.randbytes(chance.randrange(64))
    if shape < 0.06:
        return _broken_header(chance, chance.choice(subject.frames))
    if shape < 0.1:
        return _sealed(subject.kind, chance.randbytes(chance.randrange(64)))
    if shape < 0.25 and subject in subjects()[:3]:
        return _sealed(subject.kind, _lying_envelope(chance, chance.choice(subject.frames)))
    body = bytearray(chance.choice(subject.frames)[HEADER.size :])
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        chance.choice(_EDITS)(chance, body)
    return _sealed(subject.kind, bytes(body))


def _sealed(kind: int, body: bytes) -> bytes:
    return HEADER.pack(b"HDWY", SCHEMA_VERSION, kind, zlib.crc32(body, SCHEMA_VERSION << 16 | kind), len(body)) + body


def _kind(frame: bytes) -> int:
    kind: int = HEADER.unpack_from(frame)[2]
    return kind


def _broken_header(chance: Random, frame: bytes) -> bytes:
    broken = bytearray(frame)
    broken[chance.randrange(HEADER.size)] ^= 1 << chance.randrange(8)
    return bytes(broken[: chance.randrange(len(broken))]) if chance.random() < 0.5 else bytes(broken)


def _flip(chance: Random, body: bytearray) -> None:
    if body:
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)


def _mark(chance: Random, body: bytearray) -> None:
    if body:
        body[chance.randrange(len(body))] = chance.choice(_MARKERS)


def _write_number(chance: Random, body: bytearray) -> None:
    at = chance.randrange(len(body) + 1)
    number = chance.choice(_NUMBERS) % (1 << 32)
    body[at : at + 4] = number.to_bytes(4, chance.choice(("little", "big")))


def _truncate(chance: Random, body: bytearray) -> None:
    del body[chance.randrange(len(body) + 1) :]


def _cut_out(chance: Random, body: bytearray) -> None:
    at = chance.randrange(len(body) + 1)
    del body[at : at + chance.randrange(1, 9)]


def _insert(chance: Random, body: bytearray) -> None:
    at = chance.randrange(len(body) + 1)
    body[at:at] = chance.randbytes(chance.randrange(1, 9))


def _splice(chance: Random, body: bytearray) -> None:
    """Replace the rest of the frame by the end of another frame, perhaps of another kind."""
    other = chance.choice(chance.choice(subjects()).frames)
    body[chance.randrange(len(body) + 1) :] = other[chance.randrange(HEADER.size, len(other)) :]


_EDITS: tuple[Callable[[Random, bytearray], None], ...] = (
    _flip,
    _flip,
    _mark,
    _mark,
    _write_number,
    _truncate,
    _cut_out,
    _insert,
    _splice,
)


def _lying_envelope(chance: Random, frame: bytes) -> bytes:
    """Return a well-formed frame with false lengths, positions and versions, or a zstd bomb."""
    body = frame[HEADER.size :]
    end = 4 + int.from_bytes(body[:4], "little")
    envelope, buffers = msgspec.msgpack.decode(body[4:end]), body[end:]
    for _ in range(chance.randrange(3)):
        _lie(chance, envelope)
    if chance.random() < 0.5:
        planes = _bomb(chance)
        buffers, envelope[-1] = planes + buffers[envelope[-1] :] if _is_size(envelope[-1]) else planes, len(planes)
    packed = msgspec.msgpack.encode(envelope)
    return len(packed).to_bytes(4, "little") + packed + buffers


def _lie(chance: Random, value: list[Any]) -> None:
    """Replace a number or a value by another one, here or further in."""
    at = chance.randrange(len(value))
    if isinstance(value[at], list) and value[at] and chance.random() < 0.8:
        _lie(chance, value[at])
    else:
        value[at] = chance.choice((*_NUMBERS, 0.5, None, "x", [], {}))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 32


def _bomb(chance: Random) -> bytes:
    frame = bytearray(chance.choice(_bombs()))
    if chance.random() < 0.5:
        _flip(chance, frame)
    return bytes(frame)


@cache
def _bombs() -> tuple[bytes, ...]:
    """Return a few bytes that unfold to 64 MiB, or to as many as they should, with the size stated and without."""
    sizes = (3 * 6, 3 * 9, 3 * MAX_TOKENS, 64 << 20)
    packers = [zstandard.ZstdCompressor(level=1, write_content_size=stated) for stated in (True, False)]
    return tuple(packer.compress(bytes(size)) for size in sizes for packer in packers)


def _subject(kind: type[Any], values: Sequence[msgspec.Struct]) -> Subject:
    frames = tuple(map(codec.encode, values))
    return Subject(partial(codec.decode, kind=kind), codec.encode, _kind(frames[0]), frames)


def _trajectories() -> list[Trajectory]:
    plain = [_trajectory(*lengths) for lengths in ((3, 6, 1), (3, 6, 3), (0, 1, 1), (40, 300, 7))]
    replayed = [msgspec.structs.replace(plain[0], experts=_experts(8)), _with_many_experts(plain[3])]
    taught = [msgspec.structs.replace(one, teacher_logprobs=one.behavior_logprobs / 2) for one in (plain[1], *replayed)]
    return plain + replayed + taught


def _trajectory(prompt_length: int, length: int, spans: int) -> Trajectory:
    return Trajectory(
        tid=TrajectoryId("0000-00000007", 1, 3),
        prompt_tokens=np.arange(prompt_length, dtype=np.int32),
        response_tokens=np.arange(length, dtype=np.int32) + 65_500,
        behavior_logprobs=-np.linspace(0.1, 3, length, dtype=np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=_spans(0, length, spans),
        reward=0.5,
        rewards={"exact": 1.0, "length": -0.5},
        finish_reason="stop",
        worker="w",
    )


def _segments() -> list[Segment]:
    plain = [_segment(*lengths) for lengths in ((0, 0, 1, 1), (0, 0, 9, 2), (3, 200, 64, 1))]
    return [*plain, *(msgspec.structs.replace(one, experts=_experts(len(one.tokens))) for one in plain)]


def _with_many_experts(trajectory: Trajectory) -> Trajectory:
    fed = len(trajectory.prompt_tokens) + len(trajectory.response_tokens) - 1
    return msgspec.structs.replace(trajectory, experts=_experts(fed).astype(np.uint16) + 300)


def _score_requests() -> list[ScoreRequest]:
    return [
        ScoreRequest(
            prompt_tokens=np.arange(prompt, dtype=np.int32),
            response_tokens=np.arange(response, dtype=np.int32) + 65_500,
            temperature=0.7,
        )
        for prompt, response in ((1, 1), (7, 64))
    ]


def _experts(tokens: int) -> NDArray[np.uint8]:
    return np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 3, 2)


def _segment(index: int, start: int, length: int, spans: int) -> Segment:
    return Segment(
        tid=TrajectoryId("0000-00000007", 1, 3),
        index=index,
        start=start,
        tokens=np.arange(length, dtype=np.int32) + 65_500,
        behavior_logprobs=-np.linspace(0.1, 3, length, dtype=np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=_spans(start, length, spans),
    )


def _spans(start: int, length: int, count: int) -> tuple[VersionSpan, ...]:
    edges = [start + length * i // count for i in range(count + 1)]
    return tuple(VersionSpan(a, b, WeightVersion(1, i)) for i, (a, b) in enumerate(pairwise(edges)))


def _structs() -> dict[type[Any], list[msgspec.Struct]]:
    probe, version = Probe(token_ids=[1, 2, 70_000], logprobs=[-0.25, -3.0], tolerance=1e-3), WeightVersion(3, 4)
    extra: list[dict[str, Any]] = [{}, {"parts": [1, 2.5, None, {"b": [True, b"x"]}]}]
    prompts: list[msgspec.Struct] = [
        Prompt(
            group="0000-00000007",
            token_ids=[1, 2, 70_000],
            text="1+1=",
            ground_truth="2",
            data_source="arithmetic",
            extra_info=extra_info,
            num_samples=4,
        )
        for extra_info in extra
    ]
    manifest = WeightManifest(
        version=version,
        tensors=(TensorSpec("a.b", "bfloat16", (2, 3), 0, 0, 12),),
        buckets=(256,),
        probe=probe,
        group_epoch=1,
        pull_url="http://127.0.0.1:1",
        pull_token="secret",
        fingerprints=(),
        deltas=(DeltaSpec(WeightVersion(3, 3), version, 5, "cd"),),
    )
    group = BroadcastGroup(
        epoch=1,
        incarnation=1,
        transport="gloo",
        meeting="8c2f",
        learner="127.0.0.1",
        timeout_s=3.0,
        members=("a", "b"),
        at_once=2,
    )
    worker = WorkerInfo(
        worker="w1",
        host="h",
        pid=1,
        engine="embedded",
        state="generating",
        version=version,
        broadcast_epoch=1,
        wants_broadcast=True,
        capacity=8,
        active=3,
        generated_tokens=10,
        submitted=2,
        tokens_per_s=1.5,
        swaps=1,
        agent=AgentInfo(episodes=3, tool_s=0.5, failures={"raised": 2}, refused_calls={"busy": 1}),
    )
    numbers: dict[str, Any] = dict.fromkeys(StepMetrics.__struct_fields__, 1)
    bare: dict[str, Any] = dict.fromkeys(AgentFigures.__struct_fields__[:9], 1)
    numbers["agent"] = AgentFigures(**bare, failures={"raised": 1})
    lags = {"lag_histogram": {0: 3, 2: 1}, "token_lag_histogram": {0: 30, 2: 9}, "response_length_histogram": {8: 4}}
    by_lag = {2: LagFigures(trajectories=1, tokens=9, reward_mean=0.5, ess=0.9)}
    by_name = {"algorithm": {"ess": 0.9}, "reward": {"rule": 0.5, "rule/format": 1.0}, "reward_samples": {"rule": 4}}
    step = StepMetrics(**{**numbers, **lags, **by_name, "loss": None, "by_lag": by_lag})
    status = RunStatus(
        run="r",
        state="training",
        incarnation=1,
        announced=None,
        queues=QueueDepths(**dict.fromkeys(QueueDepths.__struct_fields__, 1)),
        workers=(worker,),
        last_step=step,
        recent_steps=(step,),
    )
    model, rules = ModelFiles(files={"config.json": b"{}"}), RunRules(max_lag=1, groups_per_step=2)
    pool = PoolInfo(pool="workers", host="h", pid=7, running=2, leaving=1, restarting=1, wanted=4)
    scorer = ScorerInfo(
        process="s-1", scorer="quality", kind="reward_model", host="h", pid=7, state="ready", device="cpu"
    )
    others = (probe, version, manifest, group, worker, step, status, model, rules, pool, scorer)
    return {Prompt: prompts, **{type(value): [value] for value in others}}
