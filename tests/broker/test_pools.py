"""One supervisor for each pool hears the wanted number of workers, which only the learner's user may change."""

import asyncio
from typing import Literal

import pytest
from msgspec.structs import replace

from headway.broker import Broker, open_broker
from headway.broker.errors import BrokerError, QuarantinedError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import PoolInfo
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, rules
from .test_access import admit, url_of
from .test_codec import WORKER

INFO = PoolInfo(pool="big", host="h", pid=7, running=2)
ROLES = (Role.LEARNER, Role.WORKER, Role.OBSERVER)
LONG_S = 50.0


@pytest.fixture
async def broker(broker: Broker) -> Broker:
    """Return the broker of a run that a learner has claimed."""
    await begin(broker, rules(0))
    return broker


async def test_a_supervisor_begins_with_its_count_and_hears_of_every_change(broker: Broker) -> None:
    assert await broker.pools.report(INFO, 2, LONG_S) == 2
    assert await broker.pools.scale("big", "to", 5) == (2, 5)
    assert await broker.pools.scale("big", "by", -2) == (5, 3)
    assert await broker.pools.report(INFO, 2, LONG_S) == 3
    (pool,) = (await broker.status.snapshot()).pools
    assert (pool.pool, pool.running, pool.wanted) == ("big", 2, 3)


async def test_the_run_counts_the_restarts_of_all_its_supervisors_once(broker: Broker, url: str, run_name: str) -> None:
    for restarts in (0, 2, 2, 3):  # a report may come twice
        await broker.pools.report(replace(INFO, restarts=restarts), 2, LONG_S)
    await broker.pools.report(replace(INFO, pool="other", restarts=1), 2, 0.05)
    other = await open_broker(url, run_name)
    async with asyncio.timeout(240):
        while len((await other.status.snapshot()).pools) > 1:  # noqa: ASYNC110 - nothing announces a silence
            await asyncio.sleep(0.02)
    await other.pools.report(replace(INFO, pool="other", restarts=4), 2, LONG_S)
    assert (await other.status.snapshot()).queues.worker_restarts == 3 + 1 + 4
    await other.close()


@pytest.mark.parametrize(("manner", "workers", "wanted"), [("by", -4096, 0), ("to", 4096, 4096), ("by", 4096, 4096)])
async def test_the_number_wanted_is_bounded(broker: Broker, manner: str, workers: int, wanted: int) -> None:
    await broker.pools.report(INFO, 2, LONG_S)
    assert await broker.pools.scale("big", manner, workers) == (2, wanted)  # type: ignore[arg-type]


async def test_a_pool_has_one_supervisor_and_its_successor_begins_anew(broker: Broker, url: str, run_name: str) -> None:
    other = await open_broker(url, run_name)
    await broker.pools.report(INFO, 2, 0.5)
    with pytest.raises(BrokerError, match=r"Another supervisor runs a pool 'big'.*--pool NAME"):
        await other.pools.report(INFO, 4, LONG_S)
    await broker.pools.scale("big", "to", 9)
    async with asyncio.timeout(240):
        while (await other.status.snapshot()).pools:  # noqa: ASYNC110 - nothing announces a silence
            await asyncio.sleep(0.02)
    assert await other.pools.report(INFO, 4, LONG_S) == 4
    await other.close()


async def test_nobody_scales_a_pool_that_no_living_supervisor_has(broker: Broker) -> None:
    assert await broker.pools.scale("big", "to", 5) is None
    with pytest.raises(BrokerError, match="is no name for a pool"):
        await broker.pools.scale("../big", "to", 5)


async def test_before_a_learner_claims_the_run_a_supervisor_keeps_its_own_count(url: str, run_name: str) -> None:
    early = await open_broker(url, run_name)
    assert await early.pools.report(INFO, 2, LONG_S) is None
    await early.close()


async def test_a_worker_whose_process_ended_is_dead_unless_it_is_heard_of_since(broker: Broker) -> None:
    async def is_dead(ended_s: dict[str, float]) -> bool:
        await broker.pools.report(replace(INFO, ended_s=ended_s), 2, LONG_S)
        return (await broker.status.snapshot()).silences[WORKER.worker].has_ended

    await broker.status.heartbeat(WORKER, LONG_S)
    tag = WORKER.worker.rpartition("-")[2]
    assert await is_dead({tag: 0.0})
    assert not await is_dead({"another": 0.0})
    assert not await is_dead({tag: 60.0}), "it has sent a heartbeat since"


async def test_a_workers_user_reports_and_does_not_scale(server: EmbeddedServer, run_name: str) -> None:
    users = admit(server, None)
    learner, worker, observer = [await open_broker(url_of(server, users[role]), run_name) for role in ROLES]
    await begin(learner, rules(0))
    assert await worker.pools.report(INFO, 2, LONG_S) == 2
    with pytest.raises(BrokerError, match=r"may not|permission"):
        await worker.pools.scale("big", "to", 5)
    assert await learner.pools.scale("big", "to", 5) == (2, 5)
    assert [pool.wanted for pool in (await observer.status.snapshot()).pools] == [5]
    for broker in (learner, worker, observer):
        await broker.close()


async def test_one_process_is_asked_to_drain_and_no_other_of_its_name(broker: Broker, url: str, run_name: str) -> None:
    worker = await open_broker(url, run_name)
    assert not await broker.status.exclude(WORKER.worker, "drain")
    assert not (await worker.status.heartbeat(WORKER, LONG_S)).must_drain
    assert await broker.status.exclude(WORKER.worker, "drain")
    assert (await worker.status.heartbeat(WORKER, LONG_S)).must_drain
    await worker.status.leave(WORKER.worker)
    successor = await open_broker(url, run_name)
    assert not (await successor.status.heartbeat(WORKER, LONG_S)).must_drain
    for client in (worker, successor):
        await client.close()


async def test_a_process_in_quarantine_gets_no_leases(broker: Broker, url: str, run_name: str) -> None:
    worker = await open_broker(url, run_name)
    await worker.status.heartbeat(WORKER, LONG_S)
    assert (await worker.leases.lease(WORKER.worker, WeightVersion(1, 0), 1, LONG_S)).leases
    assert await broker.status.exclude(WORKER.worker, "quarantine")
    assert not (await worker.status.heartbeat(WORKER, LONG_S)).must_drain
    with pytest.raises(QuarantinedError):
        await worker.leases.lease(WORKER.worker, WeightVersion(1, 0), 1, LONG_S)
    assert (await broker.status.snapshot()).quarantined == (WORKER.worker,)
    await worker.close()


@pytest.mark.parametrize("manner", ["drain", "quarantine"])
async def test_a_workers_user_dismisses_nobody(
    server: EmbeddedServer, run_name: str, manner: Literal["drain", "quarantine"]
) -> None:
    users = admit(server, None)
    learner, worker, observer = [await open_broker(url_of(server, users[role]), run_name) for role in ROLES]
    await begin(learner, rules(0))
    await worker.status.heartbeat(WORKER, LONG_S)
    for broker in (worker, observer):
        with pytest.raises(BrokerError, match=r"may not|permission"):
            await broker.status.exclude(WORKER.worker, manner)
    assert await learner.status.exclude(WORKER.worker, manner)
    for broker in (learner, worker, observer):
        await broker.close()
