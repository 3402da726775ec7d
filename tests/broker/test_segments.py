"""Another worker continues a sample after its last segment when its worker cannot finish it."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.broker import Broker
from headway.broker.client.learner import NotReady
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.client.submissions import measures_of
from headway.broker.errors import BrokerError, FrameError
from headway.broker.schema import Lease, Segment, VersionSpan, WeightVersion

from .renewal import renew
from .scenario import FRESH, TTL_S, Scenario, begin, group_id, groups, prompt, rules

A_MOMENT_S = 0.05


def segment(lease: Lease, index: int, step: int = 0, *, tokens: int = 4, start: int | None = None) -> Segment:
    begin = index * tokens if start is None else start
    return Segment(
        tid=lease.tid,
        index=index,
        start=begin,
        tokens=np.arange(begin, begin + tokens, dtype=np.int32) + 65_530,
        behavior_logprobs=-np.linspace(0.1, 1, tokens, dtype=np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        spans=(VersionSpan(begin, begin + tokens, WeightVersion(1, step)),),
    )


async def append(broker: Broker, lease: Lease, *indices: int, step: int = 0, ttl_s: float = TTL_S) -> None:
    for index in indices:
        reply = await broker.leases.append(lease, segment(lease, index, step), ttl_s)
        assert (reply.outcome, reply.expected) == (AppendOutcome.APPENDED, index + 1)


async def kept(broker: Broker) -> int:
    """Return the bytes of all segments and payloads on the server."""
    names = [
        n
        for kind in ("payload", "segment")
        for n in await broker._connection.scan(broker._connection.keys(f"{kind}:*"))
    ]
    return sum(await broker._connection.pipeline([("STRLEN", name) for name in names]))


async def test_a_dead_process_hands_back_what_it_held_with_its_segments_and_nothing_else(
    broker: Broker, other: Broker
) -> None:
    run = await begin(broker, rules(0), group_size=1)
    dead = (await other.leases.lease("dead", WeightVersion(1, 0), 1, TTL_S)).leases
    (mine,) = (await run.lease(1, 0, worker="mine")).leases
    await append(other, dead[0], 0)
    for stranger in ("f" * 32, other.session[:-1] + "x", other.session[1:], ""):
        with suppress(BrokerError):
            assert await broker.leases.report_death(stranger) == 0
    assert (await broker.status.snapshot()).queues.leased == 2
    assert await broker.leases.report_death(other.session) == 1
    (again,) = (await run.lease(1, 0, worker="heir")).leases
    assert (again.tid, [one.index for one in again.segments]) == (dead[0].tid, [0])
    assert (await other.leases.append(dead[0], segment(dead[0], 1), TTL_S)).outcome is AppendOutcome.FENCED
    assert (await broker.leases.append(mine, segment(mine, 0), TTL_S)).outcome is AppendOutcome.APPENDED
    queues = (await broker.status.snapshot()).queues
    assert (queues.leased, queues.expired_leases, queues.resumed_tokens) == (2, 1, 4)


async def test_calls_of_a_lost_worker_are_told_to_the_next_one_and_fenced_at_the_lost_one(broker: Broker) -> None:
    run = await begin(broker, rules(0), group_size=1)
    (first,) = (await run.lease(1, 0)).leases
    assert await broker.leases.intend(first, ["aa"]) == []
    assert await broker.leases.intend(first, ["aa", "bb"]) == []
    await broker.leases.release([first])
    assert await broker.leases.intend(first, ["cc"]) is None
    (second,) = (await run.lease(1, 0, worker="v")).leases
    assert await broker.leases.intend(first, ["cc"]) is None
    assert await broker.leases.intend(second, ["dd"]) == ["aa", "bb"]
    assert await broker.leases.intend(second, ["dd", "ee"]) == []
    assert await run.submit(second, 0) is SubmitOutcome.ACCEPTED
    assert await broker.leases.intend(second, ["ff"]) is None


@pytest.mark.parametrize("calls", [["a\nb"], ["x"], ["a" * 40_001]])
async def test_calls_that_are_no_digests_are_refused(broker: Broker, calls: list[str]) -> None:
    run = await begin(broker, rules(0), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    with pytest.raises(BrokerError, match="calls"):
        await broker.leases.intend(lease, calls)
    assert await broker.leases.intend(lease, ["aa"]) == []


async def test_resumed_tokens_are_counted_by_their_own_lag_when_the_sample_is_leased(broker: Broker) -> None:
    run = await begin(broker, rules(4, groups_per_step=1), group_size=1)
    (first,) = (await run.lease(1, 0)).leases
    await append(broker, first, 0)
    await run.announce(2)
    of_two = msgspec.structs.replace(
        segment(first, 1), spans=(VersionSpan(4, 5, WeightVersion(1, 0)), VersionSpan(5, 8, WeightVersion(1, 2)))
    )
    assert (await broker.leases.append(first, of_two, TTL_S)).outcome is AppendOutcome.APPENDED
    await run.announce(3)
    assert (await broker.status.snapshot()).tallies.resumed_by_lag == {}
    await broker.leases.release([first])
    assert len((await run.lease(1, 3, worker="v")).leases[0].segments) == 2
    status = await broker.status.snapshot()
    assert status.tallies.resumed_by_lag == {1: 3, 3: 5}
    assert status.queues.resumed_tokens == 8


async def test_another_worker_goes_on_after_the_last_segment_of_an_expired_lease(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (first,) = (await run.lease(1, 0)).leases
    assert first.segments == ()
    await append(broker, first, 0)
    await append(broker, first, 1, ttl_s=A_MOMENT_S)
    await asyncio.sleep(2 * A_MOMENT_S)
    (second,) = (await run.lease(1, 0, worker="v")).leases
    assert second.tid == first.tid
    assert [(s.index, s.start, len(s.tokens)) for s in second.segments] == [(0, 0, 4), (1, 4, 4)]
    np.testing.assert_array_equal(second.segments[1].tokens, segment(first, 1).tokens)
    np.testing.assert_array_equal(second.segments[1].behavior_logprobs, segment(first, 1).behavior_logprobs)
    late = await broker.leases.append(first, segment(first, 2), TTL_S)
    assert late.outcome is AppendOutcome.FENCED
    assert await run.submit(first, 0) is SubmitOutcome.FENCED
    await append(broker, second, 2)
    assert await run.submit(second, 0) is SubmitOutcome.ACCEPTED
    queues = await run.queues()
    assert (queues.resumed_tokens, queues.discarded_tokens) == (8, 0)
    assert queues.payload_bytes == await kept(broker)
    assert await broker._connection.scan(broker._connection.keys("segment*")) == []


async def test_appending_renews_the_lease(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0, ttl_s=A_MOMENT_S)).leases
    await append(broker, lease, 0)
    await asyncio.sleep(2 * A_MOMENT_S)
    assert (await run.lease(1, 0, worker="v")).leases == ()


async def test_an_expired_lease_that_nobody_took_is_held_again_by_its_next_segment(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0, ttl_s=A_MOMENT_S)).leases
    await asyncio.sleep(2 * A_MOMENT_S)
    assert (await run.lease(5, 0)).leases == ()  # its own worker's request only collects the expired lease
    await append(broker, lease, 0)
    assert (await run.lease(1, 0, worker="v")).leases == ()
    assert await run.submit(lease, 0) is SubmitOutcome.ACCEPTED


async def test_segments_come_in_order_and_a_repeated_one_counts_once(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    reply = await broker.leases.append(lease, segment(lease, 1), TTL_S)
    assert (reply.outcome, reply.expected) == (AppendOutcome.OUT_OF_ORDER, 0)
    await append(broker, lease, 0)
    reply = await broker.leases.append(lease, segment(lease, 0), TTL_S)
    assert (reply.outcome, reply.expected) == (AppendOutcome.OUT_OF_ORDER, 1)
    assert (await run.queues()).payload_bytes == await kept(broker) > 0


async def test_a_lost_reply_appends_once(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    frame = b"0123456789"
    measures = measures_of(frame, (VersionSpan(0, 4, WeightVersion(1, 0)),))
    arguments: list[Any] = [str(lease.tid), lease.token, 0, f"segment:{lease.tid}:x", TTL_S, measures]
    store = ("SET", broker._connection.keys(f"segment:{lease.tid}:x"), frame, "PX", 60_000)
    for _ in range(2):  # the connection repeats a call without an answer
        assert await broker._connection.script("append", *arguments, before=[store]) == [b"appended", 1]
    assert await broker._connection.execute("TTL", broker._connection.keys(f"segment:{lease.tid}:x")) == -1
    assert (await run.queues()).payload_bytes == 10


async def test_a_drained_worker_hands_its_segments_over_at_once(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    await append(broker, lease, 0)
    await broker.leases.release([lease])
    (again,) = (await run.lease(1, 0, worker="v")).leases
    assert (again.tid, len(again.segments)) == (lease.tid, 1)


async def test_old_segments_keep_the_group_old(broker: Broker) -> None:
    """A worker with newer weights goes on, and the oldest token decides until when the group must be trained."""
    run = await begin(broker, rules(1, groups_per_step=1), group_size=1)
    old, other = (await run.lease(2, 0)).leases
    await append(broker, old, 0)
    await broker.leases.release([old])
    await run.submit_all([other], 0)
    assert await run.take(0, 1) == [other.tid.group]
    await run.announce(1)
    again, newer = (await run.lease(2, 1)).leases
    assert again.tid == old.tid
    await run.submit_all([newer], 1)
    assert await run.take(1, 1) is None
    assert run.not_ready is NotReady.STRAGGLERS
    assert await run.submit(again, 0, 1) is SubmitOutcome.ACCEPTED
    assert await run.take(1, 1) == [old.tid.group]


@pytest.mark.parametrize(("on_over_bound", "resumed"), [("requeue", 0), ("mask", 1)])
async def test_segments_over_the_bound_are_thrown_away_unless_masked(
    broker: Broker, on_over_bound: str, resumed: int
) -> None:
    run = await begin(broker, rules(1, groups_per_step=1, on_over_bound=on_over_bound), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    await append(broker, lease, 0)
    await broker.leases.release([lease])
    for step in (1, 2):
        await run.announce(step)
    (again,) = (await run.lease(1, 2)).leases
    assert (again.tid, len(again.segments)) == (lease.tid, resumed)
    queues = await run.queues()
    assert (queues.resumed_tokens, queues.discarded_tokens) == (4 * resumed, 4 - 4 * resumed)


def replayed(one: Segment, layers: int = 2) -> Segment:
    """Return a segment with chosen experts; the first one has those of a prompt of 3 tokens too."""
    fed = len(one.tokens) + (0 if one.index else 2)
    return msgspec.structs.replace(one, experts=np.arange(fed * layers * 2, dtype=np.uint8).reshape(fed, layers, 2))


async def test_chosen_experts_go_along_with_segments(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (first,) = (await run.lease(1, 0)).leases
    sent = [replayed(segment(first, index)) for index in range(2)]
    for one in sent:
        await broker.leases.append(first, one, TTL_S)
    await broker.leases.release([first])
    (second,) = (await run.lease(1, 0, worker="v")).leases
    for one, other in zip(sent, second.segments, strict=True):
        assert one.experts is not None
        np.testing.assert_array_equal(one.experts, other.experts)


@pytest.mark.parametrize("layers", [None, 3])
async def test_segments_that_disagree_on_experts_are_discarded(broker: Broker, layers: int | None) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (first,) = (await run.lease(1, 0)).leases
    await broker.leases.append(first, replayed(segment(first, 0)), TTL_S)
    other = segment(first, 1) if layers is None else replayed(segment(first, 1), layers)
    await broker.leases.append(first, other, TTL_S)
    await broker.leases.release([first])
    (second,) = (await run.lease(1, 0, worker="v")).leases
    assert second.segments == ()
    assert (await run.queues()).discarded_tokens == 8
    assert (await broker.status.snapshot()).tallies.cut_by_response_length == {8: 1}


@pytest.mark.parametrize(("index", "fed"), [(0, 3), (1, 5), (1, 3)])
async def test_segments_lack_no_token_s_experts(broker: Broker, index: int, fed: int) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    short = msgspec.structs.replace(segment(lease, index), experts=np.zeros((fed, 1, 1), np.uint8))
    with pytest.raises(FrameError, match=f"segment {index} of 4 tokens with the experts of {fed}"):
        await broker.leases.append(lease, short, TTL_S)


async def test_a_damaged_segment_goes_to_the_dead_letters_and_the_sample_begins_anew(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    await append(broker, lease, 0, 1)
    (name, _) = await broker._connection.scan(broker._connection.keys("segment:*"))
    await broker._connection.execute("SETRANGE", name, 30, b"\xff\xff\xff")
    await broker.leases.release([lease])
    (again,) = (await run.lease(1, 0, worker="v")).leases
    assert again.segments == ()
    await append(broker, again, 0)
    assert await broker._connection.execute("XLEN", broker._connection.keys.hidden("dead")) == 1
    queues = await run.queues()
    assert (queues.rejected, queues.discarded_tokens, queues.payload_bytes) == (1, 8, await kept(broker))


async def test_a_rewind_voids_segments_of_the_abandoned_branch(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=1), group_size=1)
    await run.announce(1)
    (lease,) = (await run.lease(1, 1)).leases
    await append(broker, lease, 0, step=1)
    claim = await broker.batches.claim(checkpoint=FRESH, rules=rules(2, groups_per_step=1), config=b"", resume=True)
    await Scenario(broker, claim).announce(0)
    (again,) = (await broker.leases.lease("v", WeightVersion(2, 0), 1, TTL_S)).leases
    assert (again.tid.group, again.tid.round, again.segments) == (lease.tid.group, 1, ())
    assert (await broker.leases.append(lease, segment(lease, 1, 1), TTL_S)).outcome is AppendOutcome.FENCED


async def test_requeued_and_trained_groups_leave_no_segment_behind(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=2), group_size=2)
    leases = (await run.lease(4, 0)).leases
    for lease in leases:
        await append(broker, lease, 0)
    await run.submit_all(leases, 0)
    assert await run.take(0) == groups(0, 1)
    await broker.batches.commit(run.owner, 1)
    assert (await run.queues()).payload_bytes == await kept(broker) == 0


async def test_parts_that_contradict_each_other_are_refused(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    moved = msgspec.structs.replace(segment(lease, 0), start=9)
    with pytest.raises(FrameError, match="version span"):
        await broker.leases.append(lease, moved, TTL_S)


async def test_a_lost_prompt_voids_what_was_begun(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=2)
    first, second = (await run.lease(2, 0)).leases
    await append(broker, first, 0)
    await broker.leases.release([second])
    await broker._connection.execute("SET", broker._connection.keys.prompt(group_id(0)), b"junk")
    assert [lease.tid.group for lease in (await run.lease(1, 0, worker="v")).leases] == []
    assert await renew(broker, [first]) == {first.token}
    assert await broker.prompts.feed([prompt(0)], run.owner) == 1
    assert (await run.queues()).payload_bytes == await kept(broker) == 0
