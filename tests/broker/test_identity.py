"""A run that was deleted or overwritten differs from the run that has its name now."""

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from headway.broker import Broker, open_broker
from headway.broker.client.learner import new_identity
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.errors import ForeignRunError
from headway.broker.schema import SCHEMA_VERSION, WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.broker.wire import codec

from .scenario import FRESH, Scenario, as_segment, begin, broadcast_group, groups, prompt, rules, trajectory
from .test_codec import WORKER


@pytest.fixture
async def leftover(broker: Broker, url: str, run_name: str) -> AsyncIterator[Broker]:
    """Yield a worker's client from before its run is overwritten."""
    opened = await open_broker(url, run_name)
    yield opened
    await opened.close()


async def overwritten(broker: Broker) -> Scenario:
    """Return the run that has the name now; its incarnations and steps begin as those of the earlier run did."""
    await broker.status.delete_run()
    broker._connection.identity = ""  # stands for another process
    return await begin(broker, rules(1))


async def test_two_runs_of_one_name_have_two_identities(broker: Broker) -> None:
    first = await begin(broker, rules(1))
    assert len(first.claim.identity) == 16
    again = await broker.batches.claim(checkpoint=FRESH, rules=rules(1), config=b"", resume=True)
    assert again.identity == first.claim.identity
    assert (await overwritten(broker)).claim.identity != first.claim.identity


async def test_what_another_version_of_headway_left_keeps_nobody_from_going_on(
    broker: Broker, leftover: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, execute = broker._connection.keys, broker._connection.execute
    await execute("SET", keys("config"), b"{}")
    with monkeypatch.context() as before:
        before.setattr(codec, "SCHEMA_VERSION", SCHEMA_VERSION - 1)
        await execute("SET", keys("broadcast"), codec.encode(broadcast_group(9)))
        await execute("SET", keys("model"), codec.encode(ModelFiles(files={})))
    assert await leftover.status.config() is None, "no learner of this version has come"
    run = await begin(broker, rules(1))
    assert (await leftover.versions.group(), await leftover.versions.model()) == (None, None)
    await broker.versions.put_group(run.owner, broadcast_group(1))
    await broker.batches.claim(checkpoint=FRESH, rules=rules(1), config=b"", resume=True)
    assert await leftover.versions.group() is not None, "of this version"


async def test_a_learner_of_another_run_claims_nothing(broker: Broker, leftover: Broker) -> None:
    run = await begin(broker, rules(1))
    held = rf"identity {run.claim.identity}\) than the one .*--resume, .*run\.name.*--overwrite"
    with pytest.raises(ForeignRunError, match=held):
        await leftover.batches.claim(checkpoint=FRESH, rules=rules(1), config=b"", resume=True, identity=new_identity())
    await run.announce(1)  # no sample has changed hands


async def test_nothing_of_an_overwritten_run_reaches_the_new_one(broker: Broker, leftover: Broker) -> None:
    old = await begin(broker, rules(1))
    await leftover.status.heartbeat(WORKER, 30)
    leases = (await leftover.leases.lease("w", WeightVersion(1, 0), 2, 30)).leases
    assert {lease.identity for lease in leases} == {old.claim.identity}
    new = await overwritten(broker)
    assert await broker.status.workers() == ()
    assert (await new.lease(2, 0)).leases[0].tid == leases[0].tid  # both runs use the same names

    verbs = {
        "submit": lambda: leftover.leases.submit(leases[0], trajectory(leases[0], 0)),
        "lease": lambda: leftover.leases.lease("w", WeightVersion(1, 0), 2, 30),
        "release": lambda: leftover.leases.release(leases),
        "heartbeat": lambda: leftover.status.heartbeat(WORKER, 30),
        "announced": leftover.versions.announced,
        "config": leftover.status.config,
        "turn": lambda: leftover.swap_turns.take("token", 0.5, 1.0),
        "phase": lambda: leftover.phases.may_generate("w", is_awake=True),
    }
    for name, verb in verbs.items():
        with pytest.raises(ForeignRunError):
            print(name, await verb())
    assert await broker.status.workers() == (), "its last heartbeat is not one of the new run's"
    assert (await new.queues()).generated_tokens == 0


async def test_who_only_looks_sees_the_run_that_has_the_name_now(broker: Broker, leftover: Broker) -> None:
    old = await begin(broker, rules(1))
    assert (await leftover.status.snapshot()).identity == old.claim.identity
    new = await overwritten(broker)
    with pytest.raises(ForeignRunError):
        await leftover.status.snapshot()
    assert (await leftover.status.snapshot(any_identity=True)).identity == new.claim.identity


async def test_broadcasts_of_another_run_are_not_joined(broker: Broker, leftover: Broker) -> None:
    run = await begin(broker, rules(1))
    await broker.versions.put_group(run.owner, broadcast_group(1))
    assert await leftover.join() == run.claim.identity
    assert await leftover.versions.group() is not None
    new = await overwritten(broker)
    await broker.versions.put_group(new.owner, broadcast_group(1))
    with pytest.raises(ForeignRunError):
        await leftover.versions.group()


async def test_a_sample_written_for_another_run_is_generated_anew(broker: Broker, leftover: Broker) -> None:
    """This holds even for a sample that the worker's client let through, because the payload names its run."""
    run = await begin(broker, rules(1))
    first, *rest = (await run.lease(4, 0)).leases
    lying = Scenario(leftover, run.claim)
    for lease in rest:
        await run.submit(lease, 0)
    assert await lying.submit(replace(first, identity=new_identity()), 0) is SubmitOutcome.ACCEPTED
    assert await run.take(0) is None
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert (letter.tid, letter.worker) == (str(first.tid), "w")
    assert "a sample of run" in letter.reason
    await run.generate(4, 0)
    assert sorted(await run.take(0) or ()) == groups(0, 1)


async def test_a_segment_of_another_run_ends_nobody(broker: Broker) -> None:
    run = await begin(broker, rules(1))
    (lease,) = (await run.lease(1, 0)).leases
    segment = as_segment(trajectory(lease, 0))
    reply = await broker.leases.append(replace(lease, identity=new_identity()), segment, 30)
    assert reply.outcome is AppendOutcome.APPENDED
    await broker.leases.release([lease])
    (again,) = (await run.lease(1, 0, worker="v")).leases
    assert (again.tid, again.segments) == (lease.tid, ())
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert (letter.tid, letter.worker) == (str(lease.tid), "w")


async def test_the_prompts_of_an_overwritten_run_are_fed_again(broker: Broker) -> None:
    await begin(broker, rules(1), fed=4)
    new = await overwritten(broker)
    assert await broker.prompts.feed([prompt(0)], new.owner) == 0
    await new.generate(4, 0)
    assert await new.take(0) == groups(0, 1)
