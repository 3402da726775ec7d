"""Admission, leases, expiry and fencing, against a real server."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from redis.exceptions import ConnectionError as RedisConnectionError

from headway.broker import Broker, open_broker
from headway.broker.client.learner import NotReady
from headway.broker.client.leases import SubmitOutcome
from headway.broker.client.status import HeartbeatReply
from headway.broker.connection.round_trips import Command
from headway.broker.errors import BrokerError, SchemaMismatchError
from headway.broker.schema import TrajectoryId, WeightVersion
from headway.broker.staleness import is_in_reach, may_admit
from headway.broker.wire import codec
from headway.broker.wire.codec import encode

from .renewal import renew
from .scenario import FRESH, Scenario, begin, group_id, groups, of_another_schema, prompt, rules, trajectory
from .test_codec import WORKER

A_MOMENT_S = 0.05


async def test_nothing_is_leased_before_anything_is_announced(broker: Broker) -> None:
    reply = await broker.leases.lease("w", WeightVersion(1, 0), 4, 30)
    assert (reply.leases, reply.state, reply.reason) == ((), "absent", "paused")
    run = await begin(broker, rules(0))
    reply = await run.lease(4, 0)
    assert len(reply.leases) == 4
    assert reply.state == "claimed"


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("groups_per_step", [1, 3])
async def test_admission_is_what_staleness_says(broker: Broker, max_lag: int, groups_per_step: int) -> None:
    run = await begin(broker, rules(max_lag, groups_per_step), group_size=1)
    admitted = 0
    for step in range(4):
        reply = await run.generate(100, step)
        assert reply.reason == "capacity"
        for lease in reply.leases:
            assert lease.tid == TrajectoryId(group_id(admitted), 0, 0)
            assert may_admit(admitted, step, max_lag, groups_per_step)
            admitted += 1
        assert not may_admit(admitted, step, max_lag, groups_per_step)
        assert await run.take(step, groups_per_step) is not None
        await run.announce(step + 1)


@pytest.mark.parametrize(("ahead", "max_lag"), [(0, 2), (0.5, 1), (1, 1), (1.4, 3)])
async def test_less_ahead_admits_what_staleness_says(broker: Broker, ahead: float, max_lag: int) -> None:
    run = await begin(broker, rules(max_lag, groups_per_step=4, ahead=ahead), group_size=1)
    admitted = 0
    for step in range(3):
        reply = await run.generate(100, step)
        assert reply.reason == "capacity"
        for _ in reply.leases:
            assert is_in_reach(admitted, step, ahead, 4)
            assert may_admit(admitted, step, max_lag, 4)
            admitted += 1
        assert not is_in_reach(admitted, step, ahead, 4)
        assert await run.take(step, 4) is not None
        await run.announce(step + 1)


@pytest.mark.parametrize("max_lag", [1, 2])
async def test_with_less_ahead_a_slow_group_does_not_hold_up_the_step_before_its_bound(
    broker: Broker, max_lag: int
) -> None:
    run = await begin(broker, rules(max_lag, groups_per_step=1, ahead=1), group_size=1)
    slow, quick = (await run.lease(9, 0)).leases
    await run.submit(quick, 0)
    assert await run.take(0, 1) == groups(1)
    await run.announce(1)
    await run.generate(9, 1)
    if max_lag == 1:  # all that was begun is at the bound at once
        assert await run.take(1, 1) is None
        assert run.not_ready is NotReady.STRAGGLERS
        return
    assert await run.take(1, 1) == groups(2)
    await run.announce(2)
    await run.generate(9, 2)
    assert await run.take(2, 1) is None  # one step more, and group 0 would be too old
    await run.submit(slow, 0)
    assert await run.take(2, 1) == groups(0)  # the oldest one first


async def test_stale_weights_are_refused(broker: Broker) -> None:
    run = await begin(broker, rules(1, groups_per_step=1), group_size=1)
    await run.submit_all((await run.lease(2, 0)).leases, 0)
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    # Group 2 is due at step 2: weights 0 would be too old by then, weights 1 will not.
    reply = await run.lease(1, 0)
    assert (reply.leases, reply.reason) == ((), "stale weights")
    assert (await run.lease(1, 1)).leases[0].tid.group == group_id(2)
    # Weights that the next step itself would find too old are refused for a group with room, too.
    assert await run.take(1, 1) == groups(1)
    await run.announce(2)
    assert (await run.lease(1, 0)).reason == "stale weights"
    ahead = await broker.leases.lease("w", WeightVersion(2, 2), 1, 30)
    assert (ahead.leases, ahead.reason) == ((), "paused")  # the run does not know these weights


async def test_a_worker_that_obeys_another_recipe_gets_no_leases(broker: Broker) -> None:
    run = await begin(broker, rules(4), fed=4)
    broker.leases.obey(b"recipe")
    assert len((await run.lease(1, 0)).leases) == 1
    claimed = await broker.batches.claim(checkpoint=FRESH, rules=rules(4), config=b"warmer", resume=True)
    await Scenario(broker, claimed).announce(0)
    for _ in range(2):
        reply = await run.lease(9, 0)
        assert (reply.leases, reply.reason) == ((), "recipe")
        assert broker.leases.recipe_changed.is_set()
        broker.leases.obey(b"colder")
    broker.leases.obey(await broker.status.config() or b"")
    assert not broker.leases.recipe_changed.is_set()
    assert len((await run.lease(2, 0)).leases) == 2


async def test_a_retry_is_given_before_new_groups_and_only_to_weights_that_may(broker: Broker) -> None:
    run = await begin(broker, rules(1, groups_per_step=1), group_size=2)
    first = (await run.lease(2, 0)).leases
    await broker.leases.release(first)
    again = (await run.lease(3, 0)).leases
    assert [str(lease.tid) for lease in again] == [
        f"{group_id(0)}:0:0",
        f"{group_id(0)}:0:1",
        f"{group_id(1)}:0:0",
    ]
    assert {lease.token for lease in again}.isdisjoint(lease.token for lease in first)
    assert await run.submit(first[0], 0) is SubmitOutcome.FENCED


async def test_a_group_settled_before_its_prompt_was_read_costs_no_other_lease(broker: Broker) -> None:
    run = await begin(broker, rules(0))
    await broker._connection.execute("UNLINK", broker._connection.keys.prompt(group_id(0)))
    leases = (await run.lease(4, 0)).leases
    assert [lease.tid.group for lease in leases] == groups(1, 1)
    assert set(broker.leases._held["w"]) == {lease.tid for lease in leases}


async def test_a_damaged_prompt_is_fed_again_and_costs_no_other_lease(broker: Broker) -> None:
    run = await begin(broker, rules(0))
    await broker._connection.execute("SETRANGE", broker._connection.keys.prompt(group_id(0)), 20, b"\xff\xff")
    assert [lease.tid.group for lease in (await run.lease(4, 0)).leases] == groups(1, 1)
    assert (await broker.prompts.waiting())[1]
    (letter,) = await broker._connection.execute("XRANGE", broker._connection.keys.hidden("dead"), "-", "+")
    assert any(b"checksum" in part for part in letter[1])
    assert await broker.prompts.feed([prompt(0), prompt(1)], run.owner) == 1
    assert not (await broker.prompts.waiting())[1]
    assert [lease.tid.group for lease in (await run.lease(4, 0)).leases] == groups(0, 0)


async def test_a_worker_of_another_version_leaves_prompts_alone(broker: Broker) -> None:
    run = await begin(broker, rules(0))
    blob = of_another_schema(encode(prompt(0)))
    await broker._connection.execute("SET", broker._connection.keys.prompt(group_id(0)), blob)
    with pytest.raises(SchemaMismatchError, match="run the same version of Headway everywhere"):
        await run.lease(4, 0)
    assert not (await broker.prompts.waiting())[1]


async def test_prompts_that_an_earlier_version_fed_are_leased(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was resumed after an upgrade finds such prompts on its server."""
    run = await begin(broker, rules(0))
    with monkeypatch.context() as before:
        before.setattr(codec, "SCHEMA_VERSION", 7)
        blob = encode(prompt(0))
    await broker._connection.execute("SET", broker._connection.keys.prompt(group_id(0)), blob)
    (lease,) = (await run.lease(1, 0)).leases
    assert lease.prompt == prompt(0)


async def test_every_lease_has_a_token_of_its_own_and_no_sample_twice(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=4), group_size=3)
    leases = [*(await run.lease(20, 0)).leases, *(await run.lease(20, 0, worker="v")).leases]
    assert len(leases) == 36
    assert len({lease.tid for lease in leases}) == len({lease.token for lease in leases}) == 36


async def test_an_expired_lease_goes_to_another_worker_and_the_late_one_is_fenced(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=2)
    slow = (await run.lease(2, 0, ttl_s=A_MOMENT_S)).leases
    assert await run.submit(slow[0], 0) is SubmitOutcome.ACCEPTED
    await asyncio.sleep(2 * A_MOMENT_S)
    taken_over = (await run.lease(5, 0, worker="v")).leases
    assert [lease.tid for lease in taken_over] == [slow[1].tid]
    lost = {slow[0].token, slow[1].token}  # one done, one lost
    assert await broker.status.heartbeat(WORKER, 30, slow, 30) == HeartbeatReply(False, "claimed", 1, frozenset(lost))
    assert await run.submit(slow[1], 0) is SubmitOutcome.FENCED
    assert await run.submit(taken_over[0], 0) is SubmitOutcome.ACCEPTED
    queues = await run.queues()
    assert (queues.expired_leases, queues.fenced, queues.ready, queues.leased) == (1, 1, 1, 0)
    payloads = await broker._connection.scan(broker._connection.keys("payload:*"))
    assert len(payloads) == 2  # the server freed the fenced one's


async def test_a_report_renews_leases_also_where_it_is_refused(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=2)
    mine = (await run.lease(2, 0, ttl_s=A_MOMENT_S)).leases
    assert (await broker.status.heartbeat(WORKER, 30, mine[:1], 30)).lost == set()
    with pytest.raises(BrokerError, match="frame"):
        await broker.status.heartbeat(replace(WORKER, host="h" * 16384), 30, mine[1:], 30)
    await asyncio.sleep(2 * A_MOMENT_S)
    other = await open_broker(url, broker.run)
    assert (await other.leases.lease("v", WeightVersion(1, 0), 2, 30)).leases == ()
    await other.close()


async def test_a_worker_is_not_given_what_it_holds_but_keeps_it(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    mine = (await run.lease(1, 0, ttl_s=A_MOMENT_S)).leases
    await asyncio.sleep(2 * A_MOMENT_S)
    assert (await run.lease(1, 0)).leases == ()
    assert await renew(broker, mine) == set()  # no other worker took it: it is held again
    other = await open_broker(url, broker.run)
    assert (await other.leases.lease("v", WeightVersion(1, 0), 1, 30)).leases == ()
    await other.close()
    assert await run.submit(mine[0], 0) is SubmitOutcome.ACCEPTED


async def test_a_lease_whose_reply_was_lost_is_given_again_to_the_same_worker(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    lost = (await run.lease(1, 0, ttl_s=A_MOMENT_S)).leases
    broker.leases._held.clear()  # stands for a lost reply
    await asyncio.sleep(2 * A_MOMENT_S)
    again = (await run.lease(1, 0)).leases
    assert [lease.tid for lease in again] == [lost[0].tid]
    assert again[0].token != lost[0].token


async def test_an_expired_lease_that_nobody_took_may_still_be_submitted(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    late = (await run.lease(1, 0, ttl_s=A_MOMENT_S)).leases
    await asyncio.sleep(2 * A_MOMENT_S)
    assert await run.submit(late[0], 0) is SubmitOutcome.ACCEPTED


async def test_tokens_are_counted_once(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1))
    first, second = (await run.lease(2, 0)).leases
    await broker.leases.submit(first, trajectory(first, 0, tokens=5))
    await broker.leases.submit(first, trajectory(first, 0, tokens=5))
    await broker.leases.release([second])
    await broker.leases.submit(second, trajectory(second, 0, tokens=7))
    queues = await run.queues()
    assert (queues.generated_tokens, queues.wasted_tokens) == (5, 7)
    await run.generate(1, 0)
    await run.take(0, 1)
    await broker.batches.commit(run.owner, 1)
    assert (await run.queues()).generated_tokens == 11


async def test_a_repeated_submission_is_a_duplicate_and_loses_nothing(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    lease = (await run.lease(1, 0)).leases[0]
    assert await run.submit(lease, 0) is SubmitOutcome.ACCEPTED
    stored = (await run.queues()).payload_bytes
    assert await run.submit(lease, 0) is SubmitOutcome.DUPLICATE
    assert (await run.queues()).payload_bytes == stored
    names = await broker._connection.scan(broker._connection.keys("payload:*"))
    assert len(names) == 1
    assert await broker._connection.execute("PTTL", names[0]) == -1  # the segment will not expire
    assert await run.take(0, 1) == groups(0)


async def test_the_byte_cap_stops_admission_and_not_retries(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=2, max_bytes=1), group_size=2)
    leases = (await run.lease(3, 0)).leases
    await run.submit_all(leases[:1], 0)
    await broker.leases.release(leases[1:])
    reply = await run.lease(9, 0)
    assert len(reply.leases) == 3
    assert reply.reason == "bytes"


async def test_archived_weights_count_against_the_byte_cap(broker: Broker) -> None:
    run = await begin(broker, rules(2, groups_per_step=1, max_bytes=100))
    await broker.archive.keep(run.owner, {"blob": 100})
    assert (await run.lease(1, 0)).reason == "bytes"
    await broker.archive.keep(run.owner, {})
    assert len((await run.lease(1, 0)).leases) == 1


async def test_reasons(broker: Broker) -> None:
    run = await begin(broker, rules(5), fed=1)
    assert (await run.lease(3, 0)).reason == "no prompts"
    await broker.status.set_state(run.owner, "stopped")
    assert (await run.lease(1, 0)).reason == "paused"
    await broker.status.set_state(run.owner, "finished")
    reply = await run.lease(1, 0)
    assert (reply.state, reply.reason) == ("finished", "finished")


async def test_feeding_again_changes_nothing(broker: Broker) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1, fed=3)
    assert (await broker.prompts.waiting())[0] == 3
    await run.generate(1, 0)
    assert await run.take(0, 1) == groups(0)
    await broker.batches.commit(run.owner, 1)
    assert await broker.prompts.feed([prompt(i, 1) for i in range(5)], run.owner) == 2
    assert (await broker.prompts.waiting())[0] == 4
    assert await broker._connection.execute("EXISTS", broker._connection.keys.prompt(group_id(0))) == 0


async def test_a_payload_whose_reply_was_lost_lives_on(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await begin(broker, rules(0, groups_per_step=1), group_size=1)
    (lease,) = (await run.lease(1, 0)).leases
    routes = broker._connection._routes
    lost: list[Sequence[Command]] = []

    async def send(commands: Sequence[Command]) -> list[object]:
        replies = await type(routes).send(routes, commands)
        if commands[0][0] == "SET" and not lost:
            lost.append(commands)
            raise RedisConnectionError("cut")
        return replies

    monkeypatch.setattr(routes, "send", send)
    assert await run.submit(lease, 0) is SubmitOutcome.DUPLICATE
    (payload,) = await broker._connection.scan(broker._connection.keys("payload:*"))
    assert await broker._connection.execute("PTTL", payload) == -1
