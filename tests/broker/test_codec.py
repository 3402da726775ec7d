"""Every wire type comes back from its frame unchanged; for all other bytes decoding raises FrameError."""

import math
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.broker.errors import FrameError
from headway.broker.schema import (
    SCHEMA_VERSION,
    Lease,
    RunRules,
    ScoreRequest,
    Segment,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
    WeightVersion,
)
from headway.broker.schema.status import PoolInfo, QueueDepths, RunStatus, ScorerInfo, WorkerInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.schema.weights import DeltaSpec, ModelFiles, Probe, TensorSpec, WeightManifest
from headway.broker.wire import buffers, checks, codec
from headway.broker.wire.codec import (
    decode,
    decode_score_request,
    decode_segment,
    decode_trajectory,
    encode,
    encode_score_request,
    encode_segment,
    encode_trajectory,
)

from .scenario import broadcast_group, manifest, prompt, trajectory

LEASE = Lease(tid=TrajectoryId("0000-00000007", 1, 3), token="t", ttl_s=30, prompt=prompt(7))
PROBE = Probe(token_ids=[1, 2], logprobs=[-0.25], tolerance=1e-3)
WORKER = WorkerInfo(
    worker="w1",
    host="h",
    pid=1,
    engine="embedded",
    state="generating",
    version=WeightVersion(1, 2),
    broadcast_epoch=1,
    wants_broadcast=True,
    capacity=8,
    active=3,
    generated_tokens=10,
    submitted=2,
    tokens_per_s=1.5,
    swaps=1,
)
STEP = StepMetrics(
    incarnation=1,
    step=2,
    total_steps=3,
    time_s=1.0,
    reward_mean=0.5,
    reward_std=0.1,
    response_tokens_mean=12.0,
    lag_mean=1.0,
    lag_max=2,
    lag_histogram={0: 3, 2: 1},
    groups=2,
    trajectories=4,
    mixed_version_trajectories=1,
    trained_tokens=48,
    packed_tokens=60,
    micro_batches=1,
    loss=0.1,
    grad_norm=1.0,
    learning_rate=1e-3,
    algorithm={"ess": 0.9},
    take_s=0.1,
    train_s=0.1,
    publish_s=0.1,
    checkpoint_s=0.0,
    step_s=0.3,
)
QUEUES = QueueDepths(**dict.fromkeys(QueueDepths.__struct_fields__, 1))
POOL = PoolInfo(pool="big", host="h", pid=7, running=2, leaving=1, restarting=1, ended_s={"12ab34cd": 0.5}, wanted=4)
SCORER = ScorerInfo(process="s-1", scorer="quality", kind="reward_model", host="h", pid=7, state="ready", device="cpu")
STRUCTS = [
    prompt(3),
    msgspec.structs.replace(
        manifest(1, 2),
        tensors=(TensorSpec("a.b", "bfloat16", (2, 3), 0, 0, 12),),
        buckets=(256,),
        deltas=(DeltaSpec(WeightVersion(1, 1), WeightVersion(1, 2), 5, "cd"),),
    ),
    msgspec.structs.replace(broadcast_group(), learner="", timeout_s=3.0, members=("a", "b"), at_once=2),
    ModelFiles(files={"config.json": b"{}", "tokenizer.json": bytes(range(256))}),
    WORKER,
    STEP,
    RunStatus(
        run="r",
        state="training",
        incarnation=1,
        announced=None,
        queues=QUEUES,
        workers=(WORKER,),
        last_step=STEP,
        recent_steps=(STEP,),
    ),
    PROBE,
    RunRules(max_lag=1, groups_per_step=2),
    WeightVersion(3, 4),
    POOL,
    SCORER,
]
FIELDS = ("prompt_tokens", "response_tokens", "behavior_logprobs", "loss_mask")
OPTIONAL = ("experts", "teacher_logprobs", "candidate_tokens", "candidate_logprobs")


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in Trajectory.__struct_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if name in FIELDS or (name in OPTIONAL and left is not None):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


def header(kind: int, body: bytes, *, magic: bytes = b"HDWY", schema: int = SCHEMA_VERSION) -> bytes:
    return struct.pack("<4sHHII", magic, schema, kind, zlib.crc32(body, schema << 16 | kind), len(body)) + body


@pytest.mark.parametrize("value", STRUCTS, ids=lambda v: type(v).__name__)
def test_a_struct_comes_back(value: msgspec.Struct) -> None:
    assert decode(encode(value), type(value)) == value


@pytest.mark.parametrize("value", STRUCTS, ids=lambda v: type(v).__name__)
def test_damage_to_any_byte_or_the_length_is_refused(value: msgspec.Struct) -> None:
    frame = encode(value)
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 0x41
        with pytest.raises(FrameError):
            decode(bytes(damaged), type(value))
        with pytest.raises(FrameError):
            decode(frame[:position], type(value))
    with pytest.raises(FrameError, match="truncated or overlong"):
        decode(frame + b"\0", type(value))


@given(st.integers(1, 300), st.integers(0, 40), st.sets(st.integers(1, 299), max_size=4), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_trajectory_comes_back_bit_for_bit(length: int, prompt_length: int, cuts: set[int], seed: int) -> None:
    chance = np.random.default_rng(seed)
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    one = msgspec.structs.replace(
        trajectory(LEASE, 1),
        prompt_tokens=chance.integers(0, checks.MAX_TOKEN_ID + 1, prompt_length, np.int32),
        response_tokens=chance.integers(0, checks.MAX_TOKEN_ID + 1, length, np.int32),
        behavior_logprobs=-chance.exponential(10, length).astype(np.float32),
        loss_mask=chance.integers(0, 2, length, np.uint8),
        spans=tuple(VersionSpan(a, b, WeightVersion(1, i)) for i, (a, b) in enumerate(pairwise(edges))),
    )
    back = decode_trajectory(encode_trajectory(one))
    assert_same(one, back)
    assert all(getattr(back, name).flags.writeable for name in FIELDS)


@given(st.integers(1, 200), st.integers(1, 5), st.sampled_from([(np.uint8, 256), (np.uint16, buffers.MAX_EXPERTS)]))
@settings(deadline=None)
def test_chosen_experts_come_back(length: int, layers: int, of: tuple[type[np.unsignedinteger], int]) -> None:
    dtype, experts = of
    one = trajectory(LEASE, 1, tokens=length)
    fed = len(one.prompt_tokens) + len(one.response_tokens) - 1
    chosen = np.random.default_rng(length).integers(0, experts, (fed, layers, 3)).astype(dtype)
    one = msgspec.structs.replace(one, experts=chosen[:, :, ::-1])  # the order in memory does not matter
    assert_same(one, decode_trajectory(encode_trajectory(one)))
    one = msgspec.structs.replace(one, teacher_logprobs=-np.linspace(0, 9, length + 1, dtype=np.float32)[1:])
    assert_same(one, decode_trajectory(encode_trajectory(one)))


def test_a_teachers_logprobs_come_back_and_are_the_samples_own() -> None:
    one = msgspec.structs.replace(trajectory(LEASE, 1), teacher_logprobs=-np.arange(6, dtype=np.float32))
    back = decode_trajectory(encode_trajectory(one))
    assert_same(one, back)
    assert back.teacher_logprobs is not None
    assert back.teacher_logprobs.flags.writeable
    assert len(encode_trajectory(one)) == len(encode_trajectory(trajectory(LEASE, 1))) + 4 * 6


def test_a_teachers_candidates_come_back_in_eight_bytes_each() -> None:
    one = taught(trajectory(LEASE, 1))
    back = decode_trajectory(encode_trajectory(one))
    assert_same(one, back)
    bare = msgspec.structs.replace(one, candidate_tokens=None, candidate_logprobs=None)
    assert len(encode_trajectory(one)) == len(encode_trajectory(bare)) + 8 * 2 * 6


@pytest.mark.parametrize("top_k", [-1, 1025])
def test_a_request_for_more_candidates_than_any_run_has_is_refused(top_k: int) -> None:
    tokens = np.ones(2, np.int32)
    asked = ScoreRequest(prompt_tokens=tokens, response_tokens=tokens, top_k=1024)
    assert decode_score_request(encode_score_request(asked)).top_k == 1024
    with pytest.raises(FrameError, match=f"{top_k} candidates; at most 1024"):
        encode_score_request(msgspec.structs.replace(asked, top_k=top_k))


def test_chosen_experts_cost_what_they_must_and_no_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_trajectory(replayed(trajectory(LEASE, 1)))
    monkeypatch.setattr(buffers, "MAX_EXPERT_BYTES", 8 * 6 - 1)
    with pytest.raises(FrameError, match="experts of 48 bytes; at most 47"):
        decode_trajectory(frame)
    with pytest.raises(FrameError, match="router_replay=false"):
        encode_trajectory(replayed(trajectory(LEASE, 1)))


TURNS = (Turn(0, 2, 0.25), Turn(4, 6, 1.0))
MASK = np.array([1, 1, 0, 0, 1, 1], np.uint8)


def episode(turns: tuple[Turn, ...] = TURNS, mask: Sequence[int] = tuple(MASK)) -> Trajectory:
    """Return two turns, with two tokens of an environment between them."""
    return msgspec.structs.replace(trajectory(LEASE, 1), turns=turns, loss_mask=np.array(mask, np.uint8))


def piece(turns: tuple[Turn, ...] = TURNS[:1], mask: Sequence[int] = tuple(MASK), start: int = 0) -> Segment:
    """Return the same as a segment, in which only the first turn has ended."""
    whole = trajectory(LEASE, 1)
    return Segment(
        tid=whole.tid,
        index=start,
        start=start,
        tokens=whole.response_tokens,
        behavior_logprobs=whole.behavior_logprobs,
        loss_mask=np.array(mask, np.uint8),
        spans=(VersionSpan(start, start + 6, WeightVersion(1, 1)),),
        turns=turns,
    )


def test_the_turns_of_an_episode_come_back() -> None:
    assert_same(episode(), decode_trajectory(encode_trajectory(episode())))
    for one in (piece(), piece((Turn(0, 2, 0.25),), [0, 1, 1, 1, 1, 1], start=2)):
        back = decode_segment(encode_segment(one))
        assert back.turns == one.turns
        assert back.loss_mask.dtype == np.uint8
        np.testing.assert_array_equal(back.loss_mask, one.loss_mask)


@pytest.mark.parametrize(
    "turns",
    [
        (Turn(0, 6, 1.0),),
        (Turn(0, 3, 0.0), Turn(4, 6, 1.0)),
        (Turn(4, 6, 1.0), Turn(0, 2, 0.0)),
        (Turn(0, 2, math.nan), Turn(4, 6, 1.0)),
        TURNS[:1],
    ],
)
def test_turns_that_contradict_the_loss_mask_are_refused(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(FrameError, match="turn"):
        encode_trajectory(episode(turns))


def test_an_episode_does_not_end_with_what_its_environment_says() -> None:
    with pytest.raises(FrameError, match="turns"):
        encode_trajectory(episode((Turn(0, 2, 0.0),), [1, 1, 0, 0, 0, 0]))
    with pytest.raises(FrameError, match="turns"):
        encode_segment(piece(mask=[1, 1, 0, 0, 0, 0]))


@pytest.mark.parametrize(("turns", "mask"), [((), MASK), (TURNS, MASK), (TURNS[:1], [1] * 6), (TURNS[:1], [2] * 6)])
def test_a_segment_whose_turns_contradict_its_loss_mask_is_refused(
    turns: tuple[Turn, ...], mask: Sequence[int]
) -> None:
    with pytest.raises(FrameError, match=r"turns|loss mask"):
        encode_segment(piece(turns, mask))


def replayed(one: Trajectory) -> Trajectory:
    """Return a sample with two of three layers' experts for every token that was fed."""
    fed = len(one.prompt_tokens) + len(one.response_tokens) - 1
    return msgspec.structs.replace(one, experts=np.arange(fed * 6, dtype=np.uint8).reshape(fed, 3, 2))


def taught(one: Trajectory) -> Trajectory:
    """Return a sample with a teacher's logprobs and two candidates in each place beside the experts."""
    return msgspec.structs.replace(
        replayed(one),
        teacher_logprobs=one.behavior_logprobs / 2,
        candidate_tokens=np.arange(2 * len(one.response_tokens), dtype=np.int32).reshape(-1, 2) + 70_000,
        candidate_logprobs=np.tile(np.array([[-0.5, -2]], np.float32), (len(one.response_tokens), 1)),
    )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_mutated_trajectory_is_refused(data: st.DataObject) -> None:
    frame = bytearray(encode_trajectory(taught(trajectory(LEASE, 1, 2))))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        decode_trajectory(bytes(frame))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_body_mutated_under_a_right_checksum_never_raises_anything_else(data: st.DataObject) -> None:
    """An attacker or a bug can make the checksum fit: the content is still checked or refused."""
    body = bytearray(encode_trajectory(taught(trajectory(LEASE, 1, 2)))[16:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FrameError):
        checks.check_trajectory(decode_trajectory(header(1, bytes(body))))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    for frame in (noise, header(1, noise)):
        with pytest.raises(FrameError):
            decode_trajectory(frame)


def test_another_schema_a_foreign_magic_another_kind_and_nothing() -> None:
    body = msgspec.msgpack.encode(PROBE)
    assert decode(header(9, body), Probe) == PROBE
    with pytest.raises(FrameError, match=f"schema {SCHEMA_VERSION + 1}, this is schema {SCHEMA_VERSION}"):
        decode(header(9, body, schema=SCHEMA_VERSION + 1), Probe)
    with pytest.raises(FrameError, match="no frame of ours"):
        decode(header(9, body, magic=b"\x80\x04\x95\x00"), Probe)
    with pytest.raises(FrameError, match="kind 9 where a WorkerInfo"):
        decode(header(9, body), WorkerInfo)
    with pytest.raises(FrameError, match="0 bytes"):
        decode(b"", Probe)
    with pytest.raises(FrameError, match="holds no Probe"):
        decode(header(9, msgspec.msgpack.encode({"token_ids": "x"})), Probe)
    with pytest.raises(FrameError, match="holds no Prompt"):
        decode(header(2, b"\x91" * 100_000), type(prompt(0)))  # this is nested too deeply


def test_an_oversized_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(PROBE)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(frame) - 1)
    with pytest.raises(FrameError, match="are allowed"):
        encode(PROBE)
    with pytest.raises(FrameError, match="bytes"):
        decode(frame, Probe)


def test_a_decompression_bomb_is_refused() -> None:
    """Few bytes would unfold to many, so the stated size is checked before."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    for prompt_length, total in ((0, 6), (1 << 40, 6)):
        envelope = msgspec.msgpack.encode(
            [
                ["0000-00000007", 1, 3],
                "0123456789abcdef",
                prompt_length,
                total,
                [[0, 6, [1, 1]]],
                1.0,
                {},
                [],
                "stop",
                "w",
                False,
                0,
                None,
                len(bomb),
            ]
        )
        body = struct.pack("<I", len(envelope)) + envelope + bomb + bytes(4 * 6) + b"\xff"
        with pytest.raises(FrameError, match=r"token planes of|tokens; at most"):
            decode_trajectory(header(1, body))


def of_teacher(**changes: Any) -> dict[str, Any]:
    """Return a teacher's fields for six tokens, with these changes."""
    one = taught(trajectory(LEASE, 1))
    fields = ("teacher_logprobs", "candidate_tokens", "candidate_logprobs")
    return {**{name: getattr(one, name) for name in fields}, **changes}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spans": (VersionSpan(0, 3, WeightVersion(1, 1)),)}, "end at 3, the tokens at 6"),
        (
            {"spans": (VersionSpan(0, 2, WeightVersion(1, 1)), VersionSpan(3, 6, WeightVersion(1, 1)))},
            "does not follow",
        ),
        ({"spans": (VersionSpan(0, 0, WeightVersion(1, 1)), VersionSpan(0, 6, WeightVersion(1, 1)))}, "span"),
        ({"spans": ()}, "end at 0, the tokens at 6"),
        ({"spans": (VersionSpan(0, 6, WeightVersion(1, -1)),)}, "negative weight version"),
        ({"behavior_logprobs": np.zeros(5, np.float32)}, "5 logprobs"),
        ({"loss_mask": np.ones(7, np.uint8)}, "mask of 7"),
        ({"loss_mask": np.full(6, 2, np.uint8)}, "0 or 1"),
        ({"behavior_logprobs": np.full(6, np.nan, np.float32)}, "not finite"),
        ({"teacher_logprobs": np.zeros(5, np.float32)}, "5 logprobs of the teacher"),
        ({"teacher_logprobs": np.full(6, -np.inf, np.float32)}, "teacher's logprob that is not finite"),
        (
            {"candidate_tokens": np.ones((6, 2), np.int32), "candidate_logprobs": np.zeros((6, 2), np.float32)},
            "without all of",
        ),
        (of_teacher(candidate_tokens=None), "without all of their tokens and logprobs"),
        (of_teacher(candidate_tokens=np.ones((5, 2), np.int32)), r"candidates of shape \(5, 2\)"),
        (of_teacher(candidate_logprobs=np.zeros((6, 3), np.float32)), r"\(6, 3\) logprobs of them"),
        (of_teacher(candidate_tokens=np.full((6, 2), 1 << 24, np.int32)), "token ids"),
        (of_teacher(candidate_logprobs=np.full((6, 2), -np.inf, np.float32)), "candidate's logprob that is not finite"),
        (of_teacher(candidate_logprobs=np.array([[-2, -1]] * 6, np.float32)), "do not begin with the likeliest"),
        ({"reward": float("nan")}, "not finite"),
        ({"response_tokens": np.array([1, 2, 3, 4, 5, -1], np.int32)}, "token ids"),
        ({"prompt_tokens": np.array([1 << 24], np.int32)}, "token ids"),
        ({"response_tokens": np.zeros(0, np.int32)}, "0 response tokens"),
        ({"experts": np.zeros((2, 3, 2), np.uint8)}, "tokens were fed .* the experts of 2"),
        ({"experts": np.zeros((8, 3), np.uint8)}, "expected .tokens, layers, experts per token."),
        ({"experts": np.zeros((8, 3, 2), np.int64)}, "as uint8 or uint16"),
        ({"experts": np.full((8, 3, 2), 1 << 15, np.uint16)}, "expert 32768; a layer may have 32768"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        encode_trajectory(msgspec.structs.replace(trajectory(LEASE, 1), **changes))


def test_more_tokens_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_trajectory(trajectory(LEASE, 1))
    for module in (checks, codec):
        monkeypatch.setattr(module, "MAX_TOKENS", 8)
    with pytest.raises(FrameError, match="at most 8"):
        decode_trajectory(frame)
    with pytest.raises(FrameError, match="1 to 8"):
        encode_trajectory(trajectory(LEASE, 1))


def test_every_struct_that_is_encoded_has_a_kind_of_its_own() -> None:
    kinds = codec.KINDS
    assert len(set(kinds.values())) == len(kinds)
    assert set(kinds) == {type(value) for value in STRUCTS}
    assert WeightManifest in kinds
