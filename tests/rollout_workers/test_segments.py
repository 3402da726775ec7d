"""A sample's log sends its segments one at a time and in order, whatever the broker answers."""

import asyncio
from collections.abc import Callable

import pytest

from headway.broker.client.leases import AppendOutcome, AppendReply
from headway.broker.schema import Lease, Prompt, Segment, TrajectoryId, WeightVersion
from headway.rollout_workers.config import WorkersConfig
from headway.rollout_workers.engines.base import Chunk
from headway.rollout_workers.samples import recorder as segments_module
from headway.rollout_workers.samples.recorder import Recorder, SegmentLog

PROMPT = Prompt(group="g", token_ids=[5], text="5", ground_truth="", data_source="test", num_samples=1)
TID = TrajectoryId("g", 0, 0)


class Shelf:
    """The broker's side of one sample: it keeps segments in order, and fails when the test says so."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.is_away = False
        self.loses_replies = False
        self.is_fenced = False
        self.running = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.calls = 0

    async def append(self, lease: Lease, segment: Segment) -> AppendReply | None:
        self.calls += 1
        self.running += 1
        assert self.running == 1
        try:
            await self.may_answer.wait()
            reply = self._answer(segment)
            return None if self.is_away or self.loses_replies else reply
        finally:
            self.running -= 1

    def _answer(self, segment: Segment) -> AppendReply:
        if self.is_fenced:
            return AppendReply(AppendOutcome.FENCED, 0)
        if not self.is_away and segment.index == len(self.segments):
            assert segment.start == len(self.tokens)
            self.segments.append(segment)
            return AppendReply(AppendOutcome.APPENDED, len(self.segments))
        return AppendReply(AppendOutcome.OUT_OF_ORDER, len(self.segments))

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens.tolist()]


class Sample:
    """A sample that generates when the test says so, and its log."""

    def __init__(self, *, tokens: int = 4, seconds: float = 0.0, resumed: tuple[Segment, ...] = ()) -> None:
        self.shelf = Shelf()
        self.shelf.segments += resumed
        lease = Lease(tid=TID, token="t", ttl_s=1, prompt=PROMPT, segments=resumed)
        self.recorder = Recorder(resumed)
        config = WorkersConfig(segment_tokens=tokens, segment_s=seconds)
        self.log = SegmentLog(lease, self.recorder, self.shelf.append, config)

    async def grow(self, count: int) -> None:
        """Record tokens one by one, as fast as the log can send."""
        for _ in range(count):
            self.recorder.add(
                Chunk(token_ids=[len(self.recorder.tokens)], logprobs=[-1.0], version=WeightVersion(1, 0))
            )
            self.log.note()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def sizes(sample: Sample) -> list[int]:
    return [len(segment.tokens) for segment in sample.shelf.segments]


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not claim():  # noqa: ASYNC110 - watches what announces nothing
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "RETRY_S", 0)


async def test_a_segment_is_sent_every_so_many_tokens() -> None:
    sample = Sample(tokens=4)
    await sample.grow(11)
    assert sizes(sample) == [4, 4]
    await sample.log.append_rest()
    assert sizes(sample) == [4, 4, 3]
    await sample.log.append_rest()
    assert sample.shelf.tokens == sample.recorder.tokens == list(range(11))
    assert sample.shelf.calls == 3


async def test_a_segment_is_sent_after_a_while() -> None:
    sample = Sample(tokens=0, seconds=0.02)
    await sample.grow(1)
    assert sample.shelf.calls == 0
    await asyncio.sleep(0.02)
    await sample.grow(1)
    assert sizes(sample) == [2]


async def test_without_segments_nothing_is_sent() -> None:
    sample = Sample(tokens=0, seconds=0)
    await sample.grow(20)
    await sample.log.append_rest()
    assert sample.shelf.calls == 0


async def test_generation_does_not_wait_and_only_one_is_under_way() -> None:
    sample = Sample(tokens=4)
    sample.shelf.may_answer.clear()
    await sample.grow(40)
    assert sample.shelf.calls == 1
    sample.shelf.may_answer.set()
    await until(lambda: sizes(sample) == [4])
    await sample.grow(1)
    assert sizes(sample) == [4, 37]


async def test_a_resumed_sample_goes_on_after_its_segments() -> None:
    first = Sample(tokens=4)
    await first.grow(8)
    second = Sample(tokens=4, resumed=tuple(first.shelf.segments))
    assert second.recorder.tokens == list(range(8))
    await second.grow(5)
    assert sizes(second) == [4, 4, 4]
    assert second.shelf.tokens == list(range(12))


async def test_an_outage_only_delays_segments() -> None:
    sample = Sample(tokens=4)
    sample.shelf.is_away = True
    await sample.grow(9)
    assert sample.shelf.calls > 1
    sample.shelf.is_away = False
    await sample.grow(1)
    await sample.log.append_rest()
    assert sample.shelf.tokens == sample.recorder.tokens


async def test_a_segment_whose_answer_was_lost_is_sent_again_as_it_was() -> None:
    sample = Sample(tokens=4)
    sample.shelf.loses_replies = True
    await sample.grow(9)
    assert sizes(sample) == [4]
    sample.shelf.loses_replies = False
    await sample.grow(3)
    await sample.log.append_rest()
    assert sizes(sample)[0] == 4
    assert sample.shelf.tokens == sample.recorder.tokens


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_what_a_restarted_server_lost_is_sent_again(left: int) -> None:
    first = Sample(tokens=4)
    await first.grow(8)
    sample = Sample(tokens=4, resumed=tuple(first.shelf.segments))
    await sample.grow(4)
    del sample.shelf.segments[left:]
    await sample.grow(5)
    await sample.log.append_rest()
    assert sample.shelf.tokens == sample.recorder.tokens


async def test_a_broker_that_has_what_nobody_sent_gets_no_more() -> None:
    sample = Sample(tokens=4)
    other = Sample(tokens=4)
    await other.grow(8)
    sample.shelf.segments += other.shelf.segments
    await sample.grow(20)
    await sample.log.append_rest()
    assert sample.shelf.calls == 1


async def test_a_fenced_sample_sends_no_more() -> None:
    sample = Sample(tokens=4)
    sample.shelf.is_fenced = True
    await sample.grow(20)
    await sample.log.append_rest()
    assert sample.shelf.calls == 1


async def test_leaving_waits_for_what_is_under_way() -> None:
    sample = Sample(tokens=4)
    async with sample.log:
        sample.shelf.may_answer.clear()
        await sample.grow(4)
        asyncio.get_running_loop().call_later(0.01, sample.shelf.may_answer.set)
    assert sizes(sample) == [4]


async def test_a_cancelled_sample_cancels_what_is_under_way() -> None:
    sample = Sample(tokens=4)

    async def cancelled() -> None:
        async with sample.log:
            sample.shelf.may_answer.clear()
            await sample.grow(4)
            await asyncio.Event().wait()

    task = asyncio.create_task(cancelled())
    await until(lambda: sample.shelf.running == 1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert sample.shelf.running == 0
    sample.shelf.may_answer.set()
    await sample.log.append_rest()
    assert sample.shelf.tokens == sample.recorder.tokens


async def test_what_append_raises_ends_the_sample() -> None:
    async def broken(lease: Lease, segment: Segment) -> AppendReply | None:
        raise ValueError("a bug")

    sample = Sample(tokens=4)
    sample.log._append = broken
    with pytest.raises(ValueError, match="a bug"):
        await sample.grow(6)
