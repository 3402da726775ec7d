"""Runs on a cluster of three: keys on several nodes, a node that is replaced, a slot that moves."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.crc import key_slot

from headway.broker import Broker, open_broker
from headway.broker.client.leases import SubmitOutcome
from headway.broker.connection.connection import Connection
from headway.broker.connection.server_traits import ServerTraits, inspect
from headway.broker.errors import BrokerUnavailableError, ServerRestartedError
from headway.broker.schema import TrajectoryId, WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from tests.processes import kill

from .scenario import begin, group_id, groups, prompt, rules
from .test_rendezvous_store import notify_and_receive
from .test_scoring import QUALITY, ask_and_answer
from .topologies import Cluster, ask, is_redis_7_0, port_of, wait_until_caught_up


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
async def on_cluster(cluster: Cluster, run_name: str) -> AsyncIterator[Broker]:
    opened = await open_broker(cluster.url, run_name)
    yield opened
    await opened.close()


def keys_on(node: EmbeddedServer, run: str) -> set[str]:
    return {key.decode() for key in ask(node, "KEYS", f"headway:{{{run}*")}


async def test_what_it_is_like_is_asked_of_every_node(cluster: Cluster) -> None:
    assert await inspect(cluster.url) == ServerTraits(is_open=True, evictions=(), has_file=True)
    ask(cluster.nodes[1], "CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    try:
        assert (await inspect(cluster.url)).evictions == ("volatile-ttl",)
    finally:
        ask(cluster.nodes[1], "CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.mark.parametrize(("run_name", "shards"), [("whole", 1), ("spread", 4)])
async def test_a_whole_run(cluster: Cluster, on_cluster: Broker, run_name: str, shards: int) -> None:
    on_cluster.leases.storage.payload_shards = shards
    run = await begin(on_cluster, rules(1), fed=16)
    trained = []
    for step in range(8):
        reply = await run.lease(100, step)
        outcomes = await asyncio.gather(*(run.submit(lease, step) for lease in reply.leases))
        assert set(outcomes) <= {SubmitOutcome.ACCEPTED}
        if step == 0:
            used = [node for node in cluster.nodes if keys_on(node, run_name)]
            assert (len(used) > 1) == (shards > 1)
        trained.append(await run.take(step))
        await run.announce(step + 1)
    assert trained == [groups(2 * step, 2 * step + 1) for step in range(8)]
    assert await on_cluster.leases.confirm() == 0
    await on_cluster.batches.commit(run.owner, 8)
    assert not [key for node in cluster.nodes for key in keys_on(node, run_name) if "payload" in key]
    assert run_name in await on_cluster.status.runs()
    assert (await on_cluster.status.snapshot()).queues.payload_bytes == 0
    assert await on_cluster.status.delete_run() > 0
    assert not [key for node in cluster.nodes for key in keys_on(node, run_name)]


async def test_members_wait_at_the_bell(on_cluster: Broker) -> None:
    await notify_and_receive(on_cluster)


async def test_scores_are_asked_for_and_answered(on_cluster: Broker) -> None:
    await begin(on_cluster, rules(1, scorers=QUALITY))
    await ask_and_answer(on_cluster)


async def test_every_node_can_be_the_first_to_ask(cluster: Cluster, run_name: str) -> None:
    for node in cluster.nodes:
        connection = Connection(f"redis+cluster://127.0.0.1:{port_of(node)}", run_name, 10)
        keys = [connection.keys.blob(f"{shard}/payload") for shard in range(20)]
        await connection.pipeline([("SET", key, key) for key in keys])
        assert await connection.pipeline([("GET", key) for key in keys]) == [key.encode() for key in keys]
        assert await connection.make_durable(replicas=0, timeout_ms=4000) != is_redis_7_0(node)
        assert set(keys) <= set(await connection.scan(connection.keys.blob("*/*")))
        await connection.close()


@pytest.mark.slow
async def test_a_slot_that_moves_key_by_key(cluster: Cluster, on_cluster: Broker, run_name: str) -> None:
    run = await begin(on_cluster, rules(0))
    source = cluster.home(run_name)
    target = next(node for node in cluster.nodes if node is not source)
    slot = key_slot(on_cluster._connection.keys.verbs.encode())
    move = cluster.moving(slot, source, target)
    next(move)  # both nodes know that the slot is moving
    plain = on_cluster._connection.keys("plain")
    await on_cluster._connection.execute("SET", plain, "x")  # a new key is written at the target
    assert plain not in keys_on(source, run_name)
    leasing = asyncio.create_task(run.lease(4, 0))
    await asyncio.sleep(0.1)
    assert not leasing.done()  # a script never runs where it would see only some of the keys
    for _ in move:
        await on_cluster._connection.execute("GET", plain)
    leases = (await leasing).leases
    assert len(leases) == 4
    await run.submit_all(leases, 0)
    with pytest.raises(ServerRestartedError):
        await run.take(0)
    await on_cluster.batches.reassert(run.owner, announced=WeightVersion(1, 0), committed_groups=[], pinned={})
    assert await run.take(0) == groups(0, 1)


async def test_a_node_dies_and_its_replica_takes_over(cluster: Cluster, on_cluster: Broker, run_name: str) -> None:
    run = await begin(on_cluster, rules(1), fed=8)
    home = cluster.home(run_name)
    replica = cluster.add_replica(home)
    await run.generate(100, 0)
    assert await run.take(0) == groups(0, 1)
    await run.announce(1)
    wait_until_caught_up(home, replica)
    kill(home)
    waiting = asyncio.create_task(on_cluster.status.state())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
    assert await waiting == "claimed"
    with pytest.raises(ServerRestartedError):
        await run.take(1)
    pinned = {0: [TrajectoryId(group_id(position), 0, sample) for position in (0, 1) for sample in (0, 1)]}
    await on_cluster.batches.reassert(run.owner, announced=WeightVersion(1, 1), committed_groups=[], pinned=pinned)
    await on_cluster.prompts.feed([prompt(position) for position in range(8)], run.owner)
    await run.generate(100, 1)
    assert await run.take(1) == groups(2, 3)


async def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(BrokerUnavailableError, match=r"redis\+cluster://127.0.0.1:1 within 0.2 s"):
        await open_broker("redis+cluster://127.0.0.1:1", "r", timeout_s=0.2)
