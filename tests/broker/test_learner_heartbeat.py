"""The process that trains a run is named while it lives, and forgotten when it has gone or died."""

import os

from headway.broker import Broker, open_broker
from headway.broker.client.supervision import HEARTBEAT_TTL_S, LearnerInfo
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, rules
from .test_codec import WORKER
from .topologies import ask


async def test_who_uses_a_run(broker: Broker, server: EmbeddedServer) -> None:
    use = await broker.heartbeat.users()
    assert (use.learner, use.workers, use.state) == (None, (), "absent")
    me = LearnerInfo.this_process()
    assert me.pid == os.getpid()
    await begin(broker, rules(0))
    await broker.heartbeat.begin(me)
    await broker.status.heartbeat(WORKER, 30)
    use = await broker.heartbeat.users()
    assert (use.learner, use.workers, use.state) == (me, (WORKER.worker,), "claimed")
    assert 0 < ask(server, "PTTL", broker._connection.keys("holder")) <= 1000 * HEARTBEAT_TTL_S  # should it be killed
    await broker.heartbeat.end()
    assert (await broker.heartbeat.users()).learner is None


async def test_a_learner_that_ends_late_does_not_hide_its_successor(broker: Broker, url: str) -> None:
    other = await open_broker(url, broker.run)
    first, second = (LearnerInfo(host=host, pid=1, user="ali", since=0.0) for host in ("a", "b"))
    await broker.heartbeat.begin(first)
    await other.heartbeat.begin(second)
    await broker.close()
    assert (await other.heartbeat.users()).learner == second
    await other.close()


async def test_nonsense_is_nobody(broker: Broker) -> None:
    await broker._connection.execute("SET", broker._connection.keys("holder"), b"\xff" * 100_000)
    assert (await broker.heartbeat.users()).learner is None
