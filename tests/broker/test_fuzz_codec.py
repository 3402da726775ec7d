"""A broken frame is refused, or holds a value that encodes again; decoding it takes bounded memory."""

import tracemalloc
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.broker.errors import FrameError
from headway.broker.wire import codec

from .broken_frames import Subject, broken_frame, subjects

MOST_BYTES = 64 << 20
"""The memory of decoding a trajectory of the largest allowed length is about 50 MiB."""


@dataclass
class Tally:
    """The results of the inputs."""

    refused: int = 0
    decoded: int = 0
    findings: list[str] = field(default_factory=list)


def examine(subject: Subject, frame: bytes) -> bool:
    """Whether the frame holds a value; False where it is refused. Raises any other error of the decoder."""
    try:
        value = subject.decode(frame)
    except FrameError:
        return False
    again = subject.encode(value)
    assert subject.encode(subject.decode(again)) == again, "a decoded value does not come back as it went"
    return True


def fuzz(seed: int, inputs: int) -> Tally:
    """Decode that many broken frames, which are the same for the same seed."""
    chance, tally = Random(seed), Tally()
    for index in range(inputs):
        subject = chance.choice(subjects())
        frame = broken_frame(chance, subject)
        try:
            is_value = examine(subject, frame)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            tally.findings.append(f"{seed}:{index} kind {subject.kind} {error!r:.200} {frame[:400].hex()}")
            continue
        tally.decoded += is_value
        tally.refused += not is_value
    return tally


@given(st.randoms(use_true_random=False), st.sampled_from(subjects()))
@settings(max_examples=300, deadline=None)
def test_a_broken_frame_is_refused_or_a_value_that_comes_back(chance: Random, subject: Subject) -> None:
    examine(subject, broken_frame(chance, subject))


def test_broken_frames_ask_for_no_more_memory_than_the_largest_trajectory() -> None:
    tracemalloc.start()
    tally = fuzz(seed=0, inputs=4000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tally.findings == []
    assert min(tally.refused, tally.decoded) > 100
    assert peak < MOST_BYTES


def test_every_decoder_is_a_subject_and_takes_whole_frames() -> None:
    enveloped = {codec.TRAJECTORY, codec.SEGMENT, codec.SCORE_REQUEST}
    assert {subject.kind for subject in subjects()} == enveloped | {*codec.KINDS.values()}
    assert all(examine(subject, frame) for subject in subjects() for frame in subject.frames)
