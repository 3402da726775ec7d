"""A primary dies and its replica takes over at the same address: no sample is lost, and none is trained twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.broker import open_broker
from headway.broker.errors import ServerRestartedError
from headway.broker.schema import TrajectoryId, WeightVersion

from .scenario import begin, group_id, groups, prompt, rules
from .topologies import Replicated, ask


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Replicated]:
    with Replicated(tmp_path) as running:
        yield running


async def test_a_promoted_replica_goes_on(replicated: Replicated, run_name: str) -> None:
    broker = await open_broker(replicated.url, run_name)
    run = await begin(broker, rules(1, replicas=1), fed=8)
    await run.generate(100, 0)
    trained = [await run.take(0)]
    await run.announce(1)
    assert await broker._connection.make_durable(replicas=1, timeout_ms=4000)
    replicated.fail_over()
    with pytest.raises(ServerRestartedError):
        await run.take(1)
    pinned = {0: [TrajectoryId(group_id(position), 0, sample) for position in (0, 1) for sample in (0, 1)]}
    await broker.batches.reassert(run.owner, announced=WeightVersion(1, 1), committed_groups=[], pinned=pinned)
    await broker.prompts.feed([prompt(position) for position in range(8)], run.owner)
    for step in range(1, 4):
        await run.generate(100, step)
        trained.append(await run.take(step))
        await run.announce(step + 1)
    assert trained == [groups(2 * step, 2 * step + 1) for step in range(4)]
    await broker.close()


async def test_what_the_replica_never_got_is_submitted_again(replicated: Replicated, run_name: str) -> None:
    broker = await open_broker(replicated.url, run_name)
    run = await begin(broker, rules(0))
    leases = (await run.lease(4, 0)).leases
    await run.submit_all(leases[:1], 0)
    broker.leases.storage.replicas = 1
    assert await broker.leases.confirm() == 0
    # From here on the replica hears nothing, as over a line that has just broken.
    ask(replicated.replica, "REPLICAOF", "127.0.0.1", 1)
    await run.submit_all(leases[1:], 0)
    replicated.fail_over()
    assert await broker.leases.confirm() == 3
    with pytest.raises(ServerRestartedError):
        await run.take(0)
    await broker.batches.reassert(run.owner, announced=WeightVersion(1, 0), committed_groups=[], pinned={})
    assert await run.take(0) == groups(0, 1)
    await broker.close()


async def test_workers_wait_until_somebody_is_in_charge(replicated: Replicated, run_name: str) -> None:
    broker = await open_broker(replicated.url, run_name)
    run = await begin(broker, rules(0))
    assert await broker._connection.make_durable(replicas=1, timeout_ms=4000)
    replicated.proxy.lead_to(1)  # no server answers there yet
    leasing = asyncio.create_task(run.lease(4, 0))
    await asyncio.sleep(0.1)
    assert not leasing.done()
    replicated.fail_over()
    assert len((await leasing).leases) == 4
    await broker.close()
