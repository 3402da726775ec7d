"""Groups that go to the learner without some of their samples, the order of groups, and the counters."""

import asyncio

import pytest

from headway.broker import Broker
from headway.broker.client.learner import CheckpointGroups, CheckpointMark, Claim, NotReady, TakenBatch
from headway.broker.client.leases import SubmitOutcome
from headway.broker.errors import BrokerError
from headway.broker.schema import Lease, WeightVersion
from headway.broker.schema.status import Tallies, VersionGroups

from .scenario import FRESH, Scenario, begin, group_id, groups, prompt, rules

A_MOMENT_S = 0.05


async def straggling(broker: Broker, min_group_size: int) -> tuple[Scenario, Lease]:
    """Return a run whose group 0 has two of its three samples when step 1 would push it over the bound."""
    some = rules(1, groups_per_step=1, on_straggler="trim", min_group_size=min_group_size)
    run = await begin(broker, some, group_size=3)
    leases = (await run.lease(6, 0)).leases
    await run.submit_all([*leases[:2], *leases[3:]], 0)
    assert await run.take(0, 1) == groups(1)
    await run.announce(1)
    await run.generate(3, 1)
    return run, leases[2]


async def test_a_straggler_is_trimmed(broker: Broker) -> None:
    run, missing = await straggling(broker, 2)
    batch = await broker.batches.take(run.owner, 1, 1)
    assert isinstance(batch, TakenBatch)
    (group,) = batch.groups
    assert group.prompt.group == group_id(0)
    assert [t.tid.sample for t in group.trajectories] == [0, 1]
    assert len(batch.waited_s) == 1
    assert await run.take(1, 1) == groups(0)
    assert await run.submit(missing, 0) is SubmitOutcome.FENCED
    assert (await run.queues()).trimmed_samples == 1
    assert await broker.batches.commit(run.owner, 2) == 2


async def test_a_straggler_too_small_to_be_trimmed_is_requeued(broker: Broker) -> None:
    run, missing = await straggling(broker, 3)
    assert await run.take(1, 1) == groups(2)
    assert await run.submit(missing, 0) is SubmitOutcome.FENCED
    leases = (await run.lease(3, 1)).leases
    assert {(lease.tid.group, lease.tid.round) for lease in leases} == {(group_id(0), 1)}


async def test_a_trimmed_batch_survives_a_server_that_forgot_nothing(broker: Broker) -> None:
    run, _ = await straggling(broker, 1)
    batch = await broker.batches.take(run.owner, 1, 1)
    assert isinstance(batch, TakenBatch)
    tids = [t.tid for group in batch.groups for t in group.trajectories]
    await broker.batches.reassert(
        run.owner, announced=WeightVersion(1, 1), committed_groups=[], pinned={0: [], 1: tids}
    )
    assert await run.take(1, 1) == groups(0)


async def test_expired_and_returned_samples_go_in_the_order_of_their_deadlines(broker: Broker) -> None:
    run = await begin(broker, rules(3, groups_per_step=1), group_size=1)
    leases = (await run.lease(2, 0, ttl_s=A_MOMENT_S)).leases
    await broker.leases.release(leases[:1])  # group 0 is handed back
    third = (await run.lease(1, 0, ttl_s=30, worker="x")).leases
    assert third[0].tid.group == group_id(0)
    await broker.leases.release(third)
    await asyncio.sleep(2 * A_MOMENT_S)  # group 1 expires
    order = [lease.tid.group for lease in (await run.lease(3, 0, worker="v")).leases]
    assert order == groups(0, 1, 2)


async def test_a_worker_holds_no_more_than_its_limit(broker: Broker) -> None:
    run = await begin(broker, rules(1, groups_per_step=4, max_leases_per_worker=3))
    assert len((await run.lease(10, 0)).leases) == 3
    reply = await run.lease(10, 0)
    assert (reply.leases, reply.reason) == ((), "worker limit")
    assert len((await run.lease(10, 0, worker="v")).leases) == 3


async def test_dispatched_and_trained_groups_are_counted_by_length_and_lag(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=2), group_size=1)
    await run.generate(4, 0)  # prompts of 3 tokens
    await run.take(0)
    await run.announce(1)
    await run.lease(1, 0)
    assert (await broker.status.snapshot()).tallies == Tallies(
        dispatched_by_prompt_length={4: 5}, dispatched_by_lag={0: 4, 1: 1}, finished_by_response_length={8: 4}
    )
    await run.take(1)
    await broker.batches.commit(run.owner, 2)
    tallies = (await broker.status.snapshot()).tallies
    assert tallies.trained_by_prompt_length == {4: 4}
    assert tallies.trained_by_lag == {0: 2, 1: 2}


async def test_samples_are_counted_by_length_whether_they_are_accepted_or_late(broker: Broker) -> None:
    run = await begin(broker, rules(1, groups_per_step=1), group_size=1)
    (late,) = (await run.lease(1, 0)).leases
    await broker.leases.release([late])
    (timely,) = (await run.lease(1, 0, worker="v")).leases
    assert await run.submit(timely, 0) is SubmitOutcome.ACCEPTED
    assert await run.submit(timely, 0) is SubmitOutcome.DUPLICATE
    assert await run.submit(late, 0) is SubmitOutcome.FENCED
    assert (await broker.status.snapshot()).tallies.finished_by_response_length == {8: 2}
    await broker.status.delete_run()
    await run.submit(late, 0)
    assert await broker.status.runs() == ()


async def test_groups_are_counted_by_the_oldest_version_that_sampled_them(broker: Broker) -> None:
    run = await begin(broker, rules(40, groups_per_step=1), fed=64, group_size=2)
    assert (await broker.status.snapshot()).versions == ()
    await run.generate(4, 0)  # two groups
    await run.announce(1)
    mixed = (await run.lease(3, 1)).leases
    await run.submit_all(mixed[:1], 1)
    assert (await broker.status.snapshot()).versions == (
        VersionGroups(1, generating=2, ready=0, dropped=0),
        VersionGroups(0, generating=0, ready=2, dropped=0, ready_samples=4, ready_tokens=24),
    )
    assert await run.take(1, 1) == groups(0)
    assert await broker.batches.drop(run.owner, 1, groups(0)) == 1
    assert (await broker.status.snapshot()).versions[-1] == VersionGroups(
        0, generating=0, ready=1, dropped=1, ready_samples=2, ready_tokens=12
    )
    await run.announce(31)
    assert [version.step for version in (await broker.status.snapshot()).versions] == [1], "only the newest are counted"


async def test_samples_in_the_queue_count_at_their_oldest_version_and_their_tokens_at_their_own(broker: Broker) -> None:
    run = await begin(broker, rules(4, groups_per_step=1), fed=8, group_size=2)

    async def queued() -> dict[int, tuple[int, int]]:
        versions = (await broker.status.snapshot()).versions
        return {one.step: (one.ready_samples, one.ready_tokens) for one in versions if one.ready_tokens}

    one, other, late = (await run.lease(3, 0)).leases
    await run.announce(2)
    assert await run.submit(one, 0, 2) is SubmitOutcome.ACCEPTED
    assert await queued() == {}, "the group lacks a sample"
    assert await run.submit(other, 1) is SubmitOutcome.ACCEPTED
    assert await queued() == {2: (0, 5), 1: (1, 6), 0: (1, 1)}
    assert await run.submit(other, 1) is SubmitOutcome.DUPLICATE
    assert await queued() == {2: (0, 5), 1: (1, 6), 0: (1, 1)}
    await run.submit_all([late, *(await run.lease(1, 2)).leases], 2)
    assert await queued() == {2: (2, 17), 1: (1, 6), 0: (1, 1)}
    assert await run.take(2, 1) == groups(0)
    assert await queued() == {2: (2, 12)}


async def test_dropped_groups_are_named_until_the_watermark_passes_them(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1, on_over_bound="drop"), group_size=1)
    await run.generate(1, 0)
    await run.announce(1)
    assert await run.take(1, 1) is None
    assert await broker.batches.settled_without_training() == groups(0)
    assert await broker.prompts.feed([prompt(0, 1)], run.owner) == 0
    await broker.batches.commit(run.owner, 1, watermark=group_id(1))
    assert await broker.batches.settled_without_training() == []
    assert await broker.prompts.feed([prompt(0, 1)], run.owner) == 0


async def trained(broker: Broker, steps: int) -> Scenario:
    """Return a run of two groups a step, committed up to `steps`."""
    run = await begin(broker, rules(0), group_size=1)
    for step in range(steps):
        await run.generate(2, step)
        assert await run.take(step) == groups(2 * step, 2 * step + 1)
        await run.announce(step + 1)
    await broker.batches.commit(run.owner, steps, watermark=group_id(2 * steps))
    return run


async def claimed_to_replay(broker: Broker) -> Claim:
    """Train four steps, and claim the run from the checkpoint of step 2 with a log of all four."""
    await trained(broker, 4)
    return await broker.batches.claim(
        checkpoint=CheckpointMark(1, 2),
        rules=rules(0),
        config=b"",
        resume=True,
        contains=CheckpointGroups(group_id(4), ()),
        replayable_to=4,
    )


async def test_an_older_checkpoint_gets_again_exactly_what_it_has_not_trained(broker: Broker) -> None:
    await trained(broker, 4)
    checkpoint, contains = CheckpointMark(1, 2), CheckpointGroups(group_id(3), tuple(groups(5)))
    claim = await broker.batches.claim(
        checkpoint=checkpoint, rules=rules(0), config=b"", resume=True, contains=contains
    )
    assert (claim.committed_step, claim.is_rewound) == (4, True)
    assert await broker.prompts.feed([prompt(i, 1) for i in range(3, 9)], claim.owner) == 4  # 3, 4, 6, 7; 8 is held
    again = Scenario(broker, claim)
    assert await again.take(2) is None
    assert again.not_ready is NotReady.REWIND
    await again.announce(2)
    reply = await broker.leases.lease("w", WeightVersion(2, 2), 9, 30)
    assert [lease.tid.group for lease in reply.leases] == groups(3, 4)


async def test_steps_that_the_learner_can_replay_by_itself_stay_settled(broker: Broker) -> None:
    claim = await claimed_to_replay(broker)
    assert (claim.committed_step, claim.is_rewound) == (4, False)
    assert await broker.prompts.feed([prompt(i, 1) for i in range(4, 9)], claim.owner) == 0


async def test_a_checkpoint_settles_what_the_server_has_forgotten(broker: Broker) -> None:
    """Learner and server went down together, and the server lost the commit of groups that the checkpoint contains."""
    run = await begin(broker, rules(1), group_size=1)
    await run.generate(4, 0)
    claim = await broker.batches.claim(
        checkpoint=CheckpointMark(1, 1),
        rules=rules(1),
        config=b"",
        resume=True,
        contains=CheckpointGroups(group_id(1), tuple(groups(2))),
    )
    again = Scenario(broker, claim)
    await again.announce(1)
    assert await again.take(1) == groups(1, 3)


async def test_a_fresh_start_on_an_advanced_run_is_refused(broker: Broker) -> None:
    await trained(broker, 2)
    for resume in (False, True):
        with pytest.raises(BrokerError, match="--overwrite"):
            await broker.batches.claim(checkpoint=FRESH, rules=rules(0), config=b"", resume=resume)


async def test_a_replaying_learner_admits_no_more_than_the_bound(broker: Broker) -> None:
    claim = await claimed_to_replay(broker)
    again = Scenario(broker, claim)
    await again.announce(4)
    assert (await again.queues()).admitted == 8
    reply = await broker.leases.lease("w", WeightVersion(2, 4), 100, 30)
    assert [lease.tid.group for lease in reply.leases] == groups(8, 9)


async def test_regenerating_from_the_latest_checkpoint_keeps_nothing_that_was_sampled_since(broker: Broker) -> None:
    run = await trained(broker, 2)
    leases = (await run.generate(4, 2)).leases
    assert await run.take(2) == groups(4, 5)
    claim = await broker.batches.claim(
        checkpoint=CheckpointMark(1, 2),
        rules=rules(0),
        config=b"",
        resume=True,
        contains=CheckpointGroups(group_id(4), ()),
        regenerate=True,
    )
    again = Scenario(broker, claim)
    assert await again.take(2) is None
    await again.announce(2)
    fresh = (await broker.leases.lease("w", WeightVersion(2, 2), 100, 30)).leases
    assert [(lease.tid.group, lease.tid.round) for lease in fresh] == [(lease.tid.group, 1) for lease in leases]
    assert (await again.queues()).payload_bytes == 0
