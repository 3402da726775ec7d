"""Take, commit, claim and the staleness bound, against a real server."""

import asyncio
import random
from typing import Any

import pytest
import redis

from headway.broker import Broker, open_broker
from headway.broker.client.learner import CheckpointMark, NotReady, TakenBatch
from headway.broker.client.leases import SubmitOutcome
from headway.broker.errors import BrokerError, FencedError
from headway.broker.schema import Lease, WeightVersion
from headway.broker.schema.status import QueueAges, VersionGroups

from .renewal import renew
from .scenario import Scenario, begin, group_id, groups, prompt, rules


async def payloads(broker: Broker) -> list[str]:
    return await broker._connection.scan(broker._connection.keys("payload:*"))


async def test_take_gives_whole_groups_and_the_same_ones_again(broker: Broker) -> None:
    run = await begin(broker, rules(1))
    assert await run.take(0) is None
    assert run.not_ready is NotReady.GROUPS
    await run.generate(8, 0)
    batch = await broker.batches.take(run.owner, 0, 2)
    assert isinstance(batch, TakenBatch)
    assert [group.prompt for group in batch.groups] == [prompt(0), prompt(1)]
    assert [str(t.tid) for t in batch.groups[0].trajectories] == [f"{group_id(0)}:0:{i}" for i in range(2)]
    assert batch.groups[0].trajectories[0].response_tokens[0] == 65_530
    assert await run.take(0) == groups(0, 1)
    assert await run.take(1) == groups(2, 3)
    assert await run.take(0) == groups(0, 1)


async def test_a_sample_costs_the_server_few_commands(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(64, groups_per_step=8), fed=8, group_size=8)
    with redis.Redis.from_url(url) as server:
        server.config_resetstat()
        leases = (await run.lease(64, 0)).leases
        await asyncio.gather(*(run.submit(lease, 0) for lease in leases))
        assert len(await run.take(0, 8) or ()) == 8
        await broker.batches.commit(run.owner, 1)
        counted: Any = server.info("commandstats")
    assert sum(entry["calls"] for entry in counted.values()) / 64 < 11


async def test_a_look_at_a_long_queue_costs_the_server_no_more_than_at_a_short_one(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(1200, groups_per_step=1), fed=1200, group_size=1)
    for step, count in ((0, 500), (1, 601)):
        await run.announce(step)
        leases = (await run.lease(count, step)).leases
        await asyncio.gather(*(run.submit(lease, step) for lease in leases))
    with redis.Redis.from_url(url) as server:
        server.config_resetstat()
        status = await broker.status.snapshot()
        counted: Any = server.info("commandstats")
    assert sum(entry["calls"] for entry in counted.values()) < 2 * 512
    of_step_1, of_step_0 = status.versions
    assert (of_step_0.ready, of_step_1.ready, status.queues.ready) == (500, 601, 1101)
    assert of_step_0.ready_samples + of_step_1.ready_samples == 1101
    assert of_step_0.ready_samples == pytest.approx(500, abs=3)
    assert of_step_1.ready_tokens == 6 * of_step_1.ready_samples
    assert status.ages.oldest_ready_s is not None


async def test_ages_are_of_what_waits_and_a_batch_keeps_how_long_its_groups_waited(broker: Broker) -> None:
    async def ages() -> QueueAges:
        return (await broker.status.snapshot()).ages

    run = await begin(broker, rules(2), fed=3)
    assert await ages() == QueueAges()
    leased = (await run.lease(5, 0)).leases
    generating = await ages()
    assert generating.oldest_lease_s is not None
    assert generating.next_sample_s is not None, "one sample of the last group has no lease yet"
    assert (generating.oldest_ready_s, generating.mean_ready_s) == (None, None)
    await run.submit_all(leased[:2], 0)
    await asyncio.sleep(0.02)
    await run.submit_all(leased[2:], 0)
    ready = await ages()
    assert ready.oldest_ready_s is not None
    assert ready.mean_ready_s is not None
    assert 0 <= ready.mean_ready_s < ready.oldest_ready_s
    assert ready.oldest_lease_s is None
    batch, again = [await broker.batches.take(run.owner, 0, 2) for _ in range(2)]
    assert isinstance(batch, TakenBatch)
    assert isinstance(again, TakenBatch)
    assert batch.waited_s == again.waited_s
    assert max(batch.waited_s) >= ready.oldest_ready_s > min(batch.waited_s)
    assert len(batch.waited_s) == len(batch.groups)
    assert (await ages()).oldest_ready_s is None


async def test_answered_calls_are_counted_with_their_time(broker: Broker) -> None:
    run = await begin(broker, rules(1))
    calls, seconds = broker.answered, broker.answer_s
    await run.lease(1, 0)
    await broker.status.snapshot()
    assert broker.answered >= calls + 2
    assert broker.answer_s > seconds


async def test_oldest_weights_first(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=1), group_size=1)
    slow, *fast = (await run.lease(3, 0)).leases
    await run.submit_all(fast, 0)
    assert await run.take(0, 1) == groups(1)
    await run.announce(1)
    await run.generate(1, 1)
    await run.submit(slow, 0)
    assert await run.take(1, 1) == groups(0)


async def test_commit_frees_everything(broker: Broker) -> None:
    run = await begin(broker, rules(0), fed=2)
    await broker.prompts.close_feed(run.owner)
    await run.generate(4, 0)
    assert await run.take(0) == groups(0, 1)
    assert (await run.queues()).payload_bytes > 0
    assert await broker.batches.commit(run.owner, 0) == 0
    assert await run.take(0) == groups(0, 1)
    assert await broker.batches.commit(run.owner, 1) == 2
    assert await broker.batches.commit(run.owner, 1, groups(0, 1)) == 0
    queues = await run.queues()
    assert (queues.payload_bytes, queues.pinned, queues.open) == (0, 0, 0)
    left = {name.rpartition(":")[2] for name in await broker._connection.scan("*")}
    about_the_run = {"meta", "owner", "config", "settled", "tally", "secret", "verbs", "identity", "standing"}
    kept = about_the_run | {"announced", "bell", "runs"}
    assert left == kept
    await broker.batches.commit(run.owner, 1, watermark=group_id(2))
    assert await broker._connection.execute("EXISTS", broker._connection.keys.hidden("settled")) == 0
    assert await broker.prompts.feed([prompt(0), prompt(1)], run.owner) == 0  # below the watermark
    await broker.batches.take(run.owner, 1, 2)


async def test_the_last_batch_is_short_and_then_nothing_comes(broker: Broker) -> None:
    run = await begin(broker, rules(1), fed=3)
    reply = await run.lease(6, 0)
    await run.submit_all(reply.leases[:5], 0)
    assert await run.take(0) == groups(0, 1)
    await run.announce(1)
    assert await run.take(1) is None
    await broker.prompts.close_feed(run.owner)
    assert await run.take(1) is None  # a worker still works on it
    await run.submit_all(reply.leases[5:], 0)
    assert await run.take(1) == groups(2)
    assert await run.take(1) == groups(2)
    assert await run.take(2) == []


async def test_a_pinned_batch_stays_one_under_a_lower_bound(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(2, groups_per_step=1), group_size=2)
    await run.generate(6, 0)  # groups 0 to 2
    for step in (0, 1, 2):
        if step:
            await run.announce(step)
        assert await run.take(step, 1) == groups(step)
    successor = await open_broker(url, broker.run)
    claim = await successor.batches.claim(
        checkpoint=CheckpointMark(1, 1), rules=rules(0, groups_per_step=1), config=b"recipe", resume=True
    )
    resumed = Scenario(successor, claim)
    assert await resumed.take(1, 1) == groups(1)
    assert await resumed.take(2, 1) == groups(2)
    assert (await resumed.queues()).rejected == 0
    await successor.close()


@pytest.mark.parametrize("how", ["requeue", "drop"])
async def test_a_group_over_the_bound_is_generated_anew_or_dropped(broker: Broker, how: str) -> None:
    run = await begin(broker, rules(1, groups_per_step=1, on_over_bound=how, on_straggler="requeue"), group_size=2)
    await run.generate(4, 0)  # groups 0 and 1
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    await run.generate(2, 1)  # group 2
    await run.announce(2)
    assert await run.take(2, 1) == groups(2)  # group 1 has lag 2 by now
    queues = await run.queues()
    assert (queues.requeued_stale, queues.dropped_stale) == ((1, 0) if how == "requeue" else (0, 1))
    versions = (await broker.status.snapshot()).versions
    assert versions == (() if how == "requeue" else (VersionGroups(0, generating=0, ready=0, dropped=1),))
    reply = await run.lease(2, 2)
    expected = f"{group_id(1)}:1:0" if how == "requeue" else f"{group_id(3)}:0:0"
    assert str(reply.leases[0].tid) == expected
    # A dropped group makes room for another one: as many are admitted as would have been without it.
    more = await run.lease(100, 2)
    assert len(reply.leases) + len(more.leases) == 4
    assert await broker.prompts.feed([prompt(1)], run.owner) == 0


async def test_with_mask_a_group_stays_while_something_in_it_is_young_enough(broker: Broker) -> None:
    run = await begin(broker, rules(1, groups_per_step=1, on_over_bound="mask"), group_size=1)
    mixed, old = (await run.lease(2, 0)).leases
    await run.announce(1)
    await run.submit(mixed, 0, 1)
    await run.submit(old, 0)
    await run.announce(2)
    assert await run.take(2, 1) == groups(0)
    assert (await run.queues()).requeued_stale == 1  # group 1 holds nothing but tokens of weights 0


async def straggler(broker: Broker, how: str) -> tuple[Scenario, Lease, list[str] | None]:
    """Group 0 is begun with weights 0 and not finished; 1 and 2 are. Step 1 is the last that may train group 0."""
    run = await begin(broker, rules(1, groups_per_step=1, on_straggler=how), group_size=2)
    first = (await run.lease(4, 0)).leases
    await run.submit_all(first[1:], 0)
    assert await run.take(0, 1) == groups(1)
    await run.announce(1)
    await run.generate(2, 1)
    return run, first[0], await run.take(1, 1)


async def test_a_straggler_is_waited_for(broker: Broker) -> None:
    run, lease, taken = await straggler(broker, "wait")
    assert taken is None
    assert run.not_ready is NotReady.STRAGGLERS
    assert await run.submit(lease, 0) is SubmitOutcome.ACCEPTED
    assert await run.take(1, 1) == groups(0)


async def test_a_straggler_is_begun_anew(broker: Broker) -> None:
    run, lease, taken = await straggler(broker, "requeue")
    assert taken == groups(2)
    assert await renew(broker, [lease]) == {lease.token}
    assert await run.submit(lease, 0) is SubmitOutcome.FENCED
    assert (await run.queues()).requeued_stale == 1
    again = await run.lease(1, 1)
    assert str(again.leases[0].tid) == f"{group_id(0)}:1:0"


async def test_no_straggler_is_begun_anew_while_there_is_no_batch_without_it(broker: Broker) -> None:
    run = await begin(broker, rules(0, on_straggler="requeue"))
    leases = (await run.lease(4, 0)).leases
    await run.submit_all(leases[:3], 0)
    for _ in range(3):
        assert await run.take(0) is None
    assert (await run.queues()).requeued_stale == 0
    await run.submit_all(leases[3:], 0)
    assert await run.take(0) == groups(0, 1)


async def test_waiting_looks_ahead(broker: Broker) -> None:
    """Four unfinished groups are due at step 2, two a step: taking others at step 1 would push two over the bound."""
    run = await begin(broker, rules(2, groups_per_step=2), group_size=1)
    leases = (await run.lease(6, 0)).leases
    await run.submit_all(leases[4:], 0)
    assert await run.take(0) == groups(4, 5)
    await run.announce(1)
    await run.generate(2, 1)  # groups 6 and 7
    assert await run.take(1) is None
    assert run.not_ready is NotReady.STRAGGLERS
    await run.submit_all(leases[:2], 0)
    assert await run.take(1) == groups(0, 1)
    await run.submit_all(leases[2:4], 0)
    assert await run.take(2) == groups(2, 3)


@pytest.mark.parametrize(("max_lag", "how"), [(0, "wait"), (1, "wait"), (2, "wait"), (1, "requeue"), (2, "requeue")])
async def test_no_lag_exceeds_the_bound_whatever_the_order(broker: Broker, max_lag: int, how: str) -> None:
    """Workers of all speeds finish in any order: every group is trained once, none over the bound."""
    chance = random.Random(max_lag)
    run = await begin(broker, rules(max_lag, groups_per_step=3, on_straggler=how), group_size=2, fed=30)
    await broker.prompts.close_feed(run.owner)
    working: list[tuple[Lease, int]] = []
    trained: list[str] = []
    step = 0
    while True:
        weights = chance.randint(max(0, step - max_lag), step)
        reply = await run.lease(chance.randint(1, 4), weights)
        working += [(lease, weights) for lease in reply.leases]
        chance.shuffle(working)
        finished = chance.randint(0, 3)
        for lease, begun in working[:finished]:
            await run.submit(lease, *sorted({begun, step}))
        working = working[finished:]
        batch = await broker.batches.take(run.owner, step, 3)
        if isinstance(batch, NotReady):
            continue
        if not batch.groups:
            break
        for group in batch.groups:
            assert all(0 <= step - s.version.step <= max_lag for t in group.trajectories for s in t.spans)
            trained.append(group.prompt.group)
        step += 1
        await run.announce(step)
    assert sorted(trained) == groups(*range(30))
    assert step == 10
    if how == "wait":
        assert (await run.queues()).requeued_stale == 0


async def test_a_claim_fences_the_old_owner(broker: Broker, url: str) -> None:
    old = await begin(broker, rules(1))
    await old.generate(4, 0)
    assert await old.take(0) == groups(0, 1)
    other = await open_broker(url, broker.run)
    new = await begin(other, rules(1), resume=True)
    assert new.owner.incarnation == old.owner.incarnation + 1
    assert new.claim.highest_announced == 0
    for verb in (
        old.take(0),
        old.announce(1),
        broker.batches.commit(old.owner, 1),
        broker.prompts.feed([prompt(50)], old.owner),
        broker.prompts.close_feed(old.owner),
        broker.status.set_state(old.owner, "stopped"),
    ):
        with pytest.raises(FencedError, match=r"taken run .* over \(incarnation 2\)"):
            await verb
    assert await new.take(0) == groups(0, 1)
    await other.close()


async def test_a_fresh_claim_of_an_advanced_run_is_refused(broker: Broker) -> None:
    run = await begin(broker, rules(1))
    await begin(broker, rules(1))  # nothing has happened yet: fine
    run = await begin(broker, rules(1))
    await run.generate(4, 0)
    await run.take(0)
    with pytest.raises(BrokerError, match=r"already at step 1: resume it with --resume, .*run\.name.*--overwrite"):
        await begin(broker, rules(1))
    await run.announce(7)
    with pytest.raises(BrokerError, match="already at step 7"):
        await begin(broker, rules(1))
    assert (await begin(broker, rules(1), resume=True)).owner.incarnation == 4
    assert await broker.status.delete_run() > 5
    assert (await begin(broker, rules(1))).owner.incarnation == 1


async def test_a_resumed_learner_gets_its_batches_again(broker: Broker) -> None:
    run = await begin(broker, rules(2))
    taken = []
    for step in range(3):
        await run.generate(4, step)
        taken.append(await run.take(step))
        await run.announce(step + 1)
    held = (await run.lease(4, 3)).leases
    resumed = await begin(broker, rules(2), checkpoint=CheckpointMark(1, 1), resume=True)
    assert resumed.claim.highest_announced == 3
    assert (await broker.versions.current())[1] is not None
    assert [await resumed.take(1), await resumed.take(2)] == taken[1:]
    assert await renew(broker, held) == set()  # the workers went on
    await resumed.submit_all(held, 3)
    assert await resumed.take(3) == groups(6, 7)
    await broker.batches.commit(resumed.owner, 4)
    assert (await resumed.queues()).payload_bytes == 0


async def test_admission_goes_on_after_a_resume_on_an_empty_server(broker: Broker) -> None:
    run = await begin(broker, rules(1), checkpoint=CheckpointMark(3, 10), resume=True, fed=9)
    assert run.owner.incarnation == 4
    assert (await run.lease(4, 10)).reason == "paused"
    assert await run.take(10) is None
    assert run.not_ready is NotReady.ANNOUNCE
    await run.announce(10)
    reply = await broker.leases.lease("w", WeightVersion(4, 10), 100, 30)
    assert (len(reply.leases), reply.reason) == (
        8,
        "capacity",
    )  # (max_lag + 1) * groups_per_step groups of two


@pytest.mark.parametrize("how", ["corrupt", "missing", "foreign"])
async def test_a_damaged_payload_is_rejected_and_the_sample_generated_anew(broker: Broker, how: str) -> None:
    run = await begin(broker, rules(0))
    await run.generate(4, 0)
    first, _, third, _ = await payloads(broker)
    match how:
        case "corrupt":
            await broker._connection.execute("SETRANGE", first, 40, b"\xff\xff\xff\xff")
        case "missing":
            await broker._connection.execute("UNLINK", first)
        case "foreign":
            await broker._connection.execute("COPY", third, first, "REPLACE")
    assert await run.take(0) is None
    assert run.not_ready is NotReady.REJECTED
    queues = await run.queues()
    assert (queues.rejected, queues.retry, queues.pinned) == (1, 1, 1)
    [(_, entry)] = await broker._connection.execute("XRANGE", broker._connection.keys.hidden("dead"), "-", "+")
    assert dict(zip(entry[::2], entry[1::2], strict=True))[b"tid"] == f"{group_id(0)}:0:0".encode()
    await run.generate(4, 0)
    batch = await broker.batches.take(run.owner, 0, 2)
    assert isinstance(batch, TakenBatch)
    assert {(g.prompt.group, g.round) for g in batch.groups} == {(group_id(0), 0), (group_id(1), 0)}
    await broker.batches.commit(run.owner, 1)
    assert await payloads(broker) == []
    assert (await run.queues()).payload_bytes == 0


async def test_bytes_are_what_a_starved_learner_waits_for(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=1, max_bytes=1))
    await run.generate(2, 0)
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    assert (await run.lease(1, 1)).reason == "bytes"
    assert await run.take(1, 1) is None
    assert run.not_ready is NotReady.BYTES  # a commit frees these bytes
    await broker.batches.commit(run.owner, 1)
    await run.generate(2, 1)
    assert await run.take(1, 1) == groups(1)


async def test_a_step_that_cannot_fit_is_an_error(broker: Broker) -> None:
    run = await begin(broker, rules(2, max_bytes=1))
    leases = (await run.lease(2, 0)).leases
    await run.submit_all(leases[:1], 0)
    assert await run.take(0) is None
    assert run.not_ready is NotReady.BYTES  # a worker works on the other sample
    await run.submit_all(leases[1:], 0)
    with pytest.raises(BrokerError, match=r"one step needs more than broker.max_bytes=1: raise it, lower learner"):
        await run.take(0)


async def test_two_runs_on_one_server_never_touch(broker: Broker, url: str) -> None:
    one = await begin(broker, rules(0))
    other_broker = await open_broker(url, broker.run + "-b")
    two = await begin(other_broker, rules(0), fed=2)
    await asyncio.gather(one.generate(4, 0), two.generate(4, 0))
    assert await one.take(0) == await two.take(0) == groups(0, 1)
    assert await broker.status.runs() == (broker.run, broker.run + "-b")
    await other_broker.status.delete_run()
    assert await broker.status.runs() == (broker.run,)
    with pytest.raises(FencedError, match="or the run was deleted"):
        await two.take(0)
    assert await one.take(0) == groups(0, 1)
    assert (await one.queues()).pool == 38
    await other_broker.close()


async def test_groups_that_are_dropped_make_room_for_others(broker: Broker) -> None:
    run = await begin(broker, rules(2))
    await run.generate(8, 0)
    assert await run.take(0) == groups(0, 1)
    assert await broker.batches.drop(run.owner, 0, [group_id(0), group_id(3)]) == 1  # group 3 is in no batch
    assert await broker.batches.drop(run.owner, 0, [group_id(0)]) == 0
    assert await run.take(0) == groups(1, 2)
    assert await broker.batches.settled_without_training() == groups(0)
    assert await run.broker.prompts.feed([prompt(0)], run.owner) == 0
    await run.announce(1)
    await broker.batches.commit(run.owner, 1)
    queues = await run.queues()
    assert (queues.uninformative, queues.dropped_stale, queues.admitted) == (1, 0, 4)
    await run.generate(8, 1)
    assert len((await run.take(1)) or ()) == 2
    admitted = [lease for step in (1, 1, 1) for lease in (await run.generate(8, step)).leases]
    assert admitted  # dropped groups do not count against admission
