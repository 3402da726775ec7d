"""The decoders under some broken frames; `benchmarks/fuzz_decoder.py` tries millions."""

import tracemalloc
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.broken_frames import Subject, broken_frame, subjects
from benchmarks.fuzz_decoder import examine, fuzz
from headway.broker.wire import codec

MOST_BYTES = 64 << 20
"""The memory of decoding a trajectory of the largest allowed length is about 50 MiB."""


@given(st.randoms(use_true_random=False), st.sampled_from(subjects()))
@settings(max_examples=300, deadline=None)
def test_a_broken_frame_is_refused_or_a_value_that_comes_back(chance: Random, subject: Subject) -> None:
    examine(subject, broken_frame(chance, subject))


def test_broken_frames_ask_for_no_more_memory_than_the_largest_trajectory() -> None:
    tracemalloc.start()
    tally = fuzz(seed=0, chunk=0, inputs=4000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tally.findings == []
    assert min(tally.refused, tally.decoded) > 100
    assert peak < MOST_BYTES


def test_every_decoder_is_a_subject_and_takes_whole_frames() -> None:
    enveloped = {codec.TRAJECTORY, codec.SEGMENT, codec.SCORE_REQUEST}
    assert {subject.kind for subject in subjects()} == enveloped | {*codec.KINDS.values()}
    assert all(examine(subject, frame) for subject in subjects() for frame in subject.frames)


def test_a_decoder_that_lets_another_error_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "unpack", lambda body, kind: msgspec.msgpack.decode(body, type=kind))
    findings = fuzz(seed=0, chunk=0, inputs=400).findings
    assert any("ValidationError" in finding for finding in findings)
