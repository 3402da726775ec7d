"""The recorder keeps a sample's tokens, logprobs, version spans and segments, and refuses bad engine output."""

from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.broker.schema import Lease, Prompt, TrajectoryId, Turn, VersionSpan, WeightVersion
from headway.broker.wire.codec import decode_segment, encode_segment
from headway.rollout_workers.engines.base import Chunk
from headway.rollout_workers.samples.recorder import EngineOutputError, Recorder

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)
LEASE = Lease(
    tid=TrajectoryId("0000-00000007", 0, 3),
    token="a token",
    ttl_s=30,
    prompt=Prompt(
        group="0000-00000007",
        token_ids=[5, 6],
        text="56",
        ground_truth="7",
        data_source="test",
        num_samples=4,
    ),
)


def chunk(
    tokens: list[int], version: WeightVersion = V1, finish: Literal["stop", "length", "interrupted"] | None = None
) -> Chunk:
    return Chunk(token_ids=tokens, logprobs=[-float(t) for t in tokens], version=version, finish_reason=finish)


chunk_sizes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=20)


@given(chunk_sizes)
def test_spans_cover_the_response_and_name_each_tokens_version(sizes: list[tuple[int, int]]) -> None:
    recorder = Recorder()
    expected: list[WeightVersion] = []
    step = 0
    for count, advance in [*sizes, (1, 0)]:
        step += advance
        recorder.add(chunk(list(range(count)), WeightVersion(1, step)))
        expected += [WeightVersion(1, step)] * count
    spans = recorder.spans
    assert [span.version for span in spans for _ in range(span.start, span.end)] == expected
    assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
    assert spans[-1].end == len(recorder.tokens)
    assert all(left.version < right.version for left, right in pairwise(spans))


def test_a_trajectory_holds_what_the_engine_sampled() -> None:
    recorder = Recorder()
    recorder.add(chunk([1, 2], V1))
    recorder.add(chunk([3], V2, "stop"))
    trajectory = recorder.to_trajectory(LEASE, {"exact": 1.0}, 0.5, "worker-1")
    assert trajectory.tid == LEASE.tid
    assert trajectory.prompt_tokens.tolist() == [5, 6]
    assert trajectory.response_tokens.tolist() == [1, 2, 3]
    assert trajectory.behavior_logprobs.tolist() == [-1, -2, -3]
    assert trajectory.loss_mask.tolist() == [1, 1, 1]
    assert [(s.start, s.end, s.version) for s in trajectory.spans] == [(0, 2, V1), (2, 3, V2)]
    assert (trajectory.reward, trajectory.rewards, trajectory.worker) == (0.5, {"exact": 1.0}, "worker-1")
    assert trajectory.finish_reason == "stop"
    dtypes = [
        trajectory.response_tokens.dtype,
        trajectory.behavior_logprobs.dtype,
        trajectory.loss_mask.dtype,
    ]
    assert dtypes == [np.int32, np.float32, np.uint8]


def two_turns() -> Recorder:
    """Record [1, 2], the answer [8, 9], then [3] by newer weights."""
    recorder = Recorder()
    recorder.add(chunk([1, 2], V1, "stop"))
    recorder.add_environment_tokens([8, 9], 0.25)
    recorder.add(chunk([3], V2, "stop"))
    return recorder


def test_what_an_environment_says_is_not_trained_and_has_no_logprob() -> None:
    trajectory = two_turns().to_trajectory(LEASE, {"exact": 1.0}, 0.5, "worker-1")
    assert trajectory.response_tokens.tolist() == [1, 2, 8, 9, 3]
    assert trajectory.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert trajectory.behavior_logprobs.tolist() == [-1, -2, 0, 0, -3]
    assert trajectory.spans == (VersionSpan(0, 4, V1), VersionSpan(4, 5, V2))
    assert trajectory.turns == (Turn(0, 2, 0.25), Turn(4, 5, 0.5))
    assert trajectory.reward == 0.75, "the sum of its turns'"


def test_no_segment_ends_with_what_an_environment_says() -> None:
    recorder = Recorder()
    recorder.add(chunk([1, 2], V1, "stop"))
    recorder.add_environment_tokens([8, 9], 0.25)
    assert (recorder.tokens, recorder.environment_tokens, recorder.turns) == ([1, 2], [8, 9], [])
    first = recorder.segment(LEASE.tid, 0, 0)
    recorder.add(chunk([3], V2))
    segments = [decode_segment(encode_segment(one)) for one in (first, recorder.segment(LEASE.tid, 1, 2))]
    assert [one.loss_mask.tolist() for one in segments] == [[1, 1], [0, 0, 1]]
    assert [one.turns for one in segments] == [(), (Turn(0, 2, 0.25),)]
    restored = Recorder(segments)
    assert (restored.turns, restored.turn_start, restored.loss_mask) == (recorder.turns, 4, recorder.loss_mask)
    assert (restored.tokens, restored.spans) == (recorder.tokens, recorder.spans)


def test_a_turn_without_a_token_is_refused() -> None:
    recorder = Recorder()
    recorder.add(chunk([1], V1, "stop"))
    recorder.add_environment_tokens([8], 0.0)
    recorder.add(chunk([], V1, "stop"))
    with pytest.raises(EngineOutputError, match="each turn needs a token"):
        recorder.finished()


def test_versions_going_backwards_are_refused() -> None:
    recorder = Recorder()
    recorder.add(chunk([1], V2))
    with pytest.raises(EngineOutputError, match="went back"):
        recorder.add(chunk([1], V1))


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(EngineOutputError, match="2 tokens with 1 logprobs"):
        Recorder().add(Chunk(token_ids=[1, 2], logprobs=[-1.0], version=V1))


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_logprobs_that_cannot_be_are_refused(logprob: float) -> None:
    with pytest.raises(EngineOutputError, match="as a logprob"):
        Recorder().add(Chunk(token_ids=[1], logprobs=[logprob], version=V1))


def test_nothing_follows_a_finish() -> None:
    recorder = Recorder()
    recorder.add(chunk([1], V1, "length"))
    with pytest.raises(EngineOutputError, match="finished"):
        recorder.add(chunk([2], V1))


def test_an_interruption_is_no_end() -> None:
    recorder = Recorder()
    recorder.add(chunk([1], V2, "interrupted"))
    assert recorder.finish_reason is None
    recorder.add(chunk([], V1))  # no token, no version: the version did not go back
    recorder.add(chunk([2], V2, "stop"))
    assert (recorder.tokens, recorder.spans) == ([1, 2], [VersionSpan(0, 2, V2)])


@given(chunk_sizes, st.lists(st.integers(0, 100), max_size=4))
def test_segments_cut_anywhere_restore_the_sample(sizes: list[tuple[int, int]], cuts: list[int]) -> None:
    recorder = Recorder()
    step = 0
    for count, advance in [*sizes, (1, 0)]:
        step += advance
        recorder.add(chunk(list(range(count)), WeightVersion(1, step)))
    length = len(recorder.tokens)
    starts = sorted({0, *(cut for cut in cuts if cut < length)})
    segments = [
        decode_segment(encode_segment(until(recorder, end).segment(LEASE.tid, index, start)))
        for index, (start, end) in enumerate(pairwise([*starts, length]))
    ]
    restored = Recorder(segments)
    assert (restored.tokens, restored.logprobs) == (recorder.tokens, recorder.logprobs)
    assert restored.spans == recorder.spans


def until(recorder: Recorder, end: int) -> Recorder:
    """Return the recorder's state when it had `end` tokens."""
    earlier = Recorder()
    for span in recorder.spans:
        for position in range(span.start, min(span.end, end)):
            token, logprob = recorder.tokens[position], recorder.logprobs[position]
            earlier.add(Chunk(token_ids=[token], logprobs=[logprob], version=span.version))
    return earlier
