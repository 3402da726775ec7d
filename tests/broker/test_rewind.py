"""A learner goes back to an older checkpoint, and samples of the abandoned branch's weights are never trained."""

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark, NotReady
from headway.broker.client.leases import SubmitOutcome
from headway.broker.schema import Lease, WeightVersion

from .scenario import Scenario, begin, group_id, groups, rules


async def branch(broker: Broker) -> tuple[Scenario, list[Lease]]:
    """Each step has one group of one sample: 0 to 2 are pinned to steps, 3 is ready, 4 to 6 are in flight, 7 is not."""
    run = await begin(broker, rules(4, groups_per_step=1), group_size=1)
    for step in range(3):
        await run.submit_all((await run.lease(1, step)).leases, step)
        assert await run.take(step, 1) == groups(step)
        await run.announce(step + 1)
    await run.submit_all((await run.lease(1, 3)).leases, 3)
    return run, list((await run.lease(3, 3)).leases)


async def rewind(broker: Broker, step: int) -> Scenario:
    return await begin(
        broker, rules(4, groups_per_step=1), group_size=1, checkpoint=CheckpointMark(1, step), resume=True
    )


async def test_samples_of_the_abandoned_branch_are_generated_anew(broker: Broker) -> None:
    _, flying = await branch(broker)
    resumed = await rewind(broker, 1)
    assert (await resumed.queues()).pinned == 2
    await resumed.announce(1)
    queues = await resumed.queues()
    assert (queues.pinned, queues.ready, queues.requeued_stale) == (0, 1, 2)  # groups 2 and 3 begin anew
    assert await resumed.take(1, 1) == groups(1)
    assert await resumed.submit(flying[0], 3) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[1], 3, WeightVersion(2, 1)) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[2], 1, WeightVersion(2, 1)) is SubmitOutcome.ACCEPTED  # weights 1 are common
    queues = await resumed.queues()
    assert (queues.fenced, queues.leased, queues.ready, queues.retry) == (2, 0, 1, 4)
    again = await broker.leases.lease("w", WeightVersion(2, 1), 4, 30)
    assert [str(lease.tid) for lease in again.leases] == [
        f"{group_id(2)}:1:0",
        f"{group_id(3)}:1:0",
        f"{group_id(4)}:0:0",
        f"{group_id(5)}:0:0",
    ]


async def test_the_abandoned_branch_stays_so_once_its_steps_are_passed(broker: Broker) -> None:
    _, flying = await branch(broker)
    resumed = await rewind(broker, 1)
    for step in range(1, 5):
        await resumed.announce(step)
    assert (await resumed.lease(1, 3)).reason == "stale weights"
    assert await resumed.submit(flying[0], 3) is SubmitOutcome.FENCED
    again = await rewind(broker, 2)  # a second rewind, above the first: both count
    await again.announce(2)
    assert await again.submit(flying[1], WeightVersion(1, 2)) is SubmitOutcome.FENCED
    assert await again.submit(flying[2], WeightVersion(2, 2)) is SubmitOutcome.ACCEPTED


async def test_a_resumed_learner_that_caught_up_abandons_nothing(broker: Broker) -> None:
    _, flying = await branch(broker)
    resumed = await rewind(broker, 1)
    await resumed.announce(3)
    assert await resumed.submit(flying[0], 3) is SubmitOutcome.ACCEPTED
    queues = await resumed.queues()
    assert (queues.pinned, queues.ready, queues.fenced) == (2, 2, 0)


async def test_a_batch_to_be_replayed_that_is_damaged_abandons_what_it_had_led_to(broker: Broker) -> None:
    _, flying = await branch(broker)
    resumed = await rewind(broker, 1)  # it would make weights 3 again, from the batches of steps 1 and 2
    (payload,) = await broker._connection.scan(broker._connection.keys(f"payload:{group_id(1)}:*"))
    await broker._connection.execute("SETRANGE", payload, 40, b"\xff\xff\xff\xff")
    assert await resumed.take(1, 1) is None
    assert await resumed.take(1, 1) is None
    assert resumed.not_ready is NotReady.REWIND
    assert await resumed.submit(flying[0], 3) is SubmitOutcome.FENCED
    await resumed.announce(1)
    taken = await resumed.take(1, 1)
    assert taken is None or taken == groups(1)
    queues = await resumed.queues()
    assert (queues.pinned, queues.ready) == (0, 0)  # samples of weights 2 and 3 are generated anew
