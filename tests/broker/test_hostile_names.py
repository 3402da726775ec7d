"""A hostile worker neither takes the name of another worker nor puts its own deeds down to it."""

import asyncio

import pytest
from redis.exceptions import RedisError

from headway.broker.client.leases import SubmitOutcome
from headway.broker.errors import BrokerError

from .audit import Auditor
from .hostile import Cast
from .test_codec import WORKER


async def test_it_reports_under_no_name_of_another(cast: Cast) -> None:
    await cast.worker.status.heartbeat(WORKER, 30)
    assert cast.hostile.call("heartbeat", WORKER.worker, "evil", 30_000, b"junk", 1)[0] == 0
    cast.hostile.call("leave", WORKER.worker, "evil")
    assert [(info.worker, info.host) for info in await cast.learner.status.workers()] == [(WORKER.worker, WORKER.host)]
    with pytest.raises(RedisError, match="ARGUMENT"):
        cast.hostile.call("heartbeat", "big", "evil", 30_000, b"x" * 16_385, 1)


async def test_it_takes_no_name_of_a_worker_that_is_held_up(cast: Cast) -> None:
    await cast.worker.status.heartbeat(WORKER, 0.001)
    await asyncio.sleep(0.01)
    assert await cast.learner.status.workers() == ()
    assert cast.hostile.call("heartbeat", WORKER.worker, "evil", 30_000, b"junk", 1)[0] == 0
    await cast.worker.status.heartbeat(WORKER, 30)
    assert [info.host for info in await cast.learner.status.workers()] == [WORKER.host]


async def test_no_name_is_held_for_long_without_a_word(cast: Cast, auditor: Auditor) -> None:
    """A client that wants to keep names from others has to name them again all the time."""
    assert cast.hostile.call("heartbeat", "evil", "s", 3_600_000, b"junk", 1)[0] == 1
    for name in ("worker:evil", "session:evil"):
        assert 0 < auditor.redis.pttl(auditor.keys.hidden(name)) <= 120_000


async def test_samples_that_it_leases_under_the_name_of_another_are_not_that_ones(cast: Cast) -> None:
    """A worker that comes second to its name can still work."""
    await cast.worker.status.heartbeat(WORKER, 30)
    assert cast.hostile.call("heartbeat", "w2", "evil", 30_000, b"junk", 1)[0] == 1
    for name in (WORKER.worker, "w2"):
        (leased,) = cast.hostile.lease(1, holder=f"{name} evil")
        assert cast.hostile.submit(leased, 0, 1000) == b"fenced"
    (lease,) = (await cast.honest.lease(1, 0, worker=WORKER.worker)).leases
    await cast.worker.leases.give_up(lease, "no reward")
    (second,) = (await cast.honest.lease(1, 0, worker="w2")).leases
    assert await cast.honest.submit(second, 0) is SubmitOutcome.ACCEPTED
    letters = (await cast.learner.status.snapshot()).dead_letters
    assert [letter.worker for letter in letters] == [f"{WORKER.worker}?", "w2", WORKER.worker]


async def test_whoever_begins_again_under_new_names_is_noticed(cast: Cast) -> None:
    """A quarantine does not stop it, and samples that an honest worker hands back do not count."""
    (lease,) = (await cast.honest.lease(1, 0)).leases
    await cast.worker.leases.give_up(lease, "no reward")
    for number in range(4):
        (leased,) = cast.hostile.lease(1, holder=f"evil{number} {number}")
        assert cast.hostile.submit(leased, 0, 1000) == b"fenced"
    status = await cast.learner.status.snapshot()
    assert (status.refused_lately, status.refused_workers, status.queues.rejected) == (4, 4, 5)


async def test_its_names_are_so_many_and_no_more(cast: Cast, auditor: Auditor) -> None:
    """Names make room once they send no more heartbeats."""
    keys = auditor.keys
    with cast.hostile.client.pipeline(transaction=False) as pipe:
        for number in range(4200):
            key = f"{cast.hostile.prefix}hidden:of:{cast.hostile.identity}"
            pipe.fcall(f"{cast.hostile.library}_heartbeat", 1, key, f"n{number}", "evil", 600_000, b"junk", 0)
        replies = pipe.execute(raise_on_error=False)
    assert sum(isinstance(reply, list) for reply in replies) == 4096
    assert all("4096 are alive" in str(reply) for reply in replies if not isinstance(reply, list))
    with pytest.raises(BrokerError, match="4096 are alive"):
        await cast.worker.status.heartbeat(WORKER, 30)
    auditor.redis.unlink(keys.hidden("worker:n7"), keys.hidden("session:n7"))
    await cast.worker.status.heartbeat(WORKER, 30)
    assert WORKER.worker in [info.worker for info in await cast.learner.status.workers()]


async def test_its_junk_reports_are_a_line_each_look_at_most(cast: Cast, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(200):
        cast.hostile.call("pool", f"p{number}", "s", 60_000, b"junk", 1, 0)
        cast.hostile.call("heartbeat", f"w{number}", "s", 60_000, b"junk", 1)
    for _ in range(2):
        status = await cast.learner.status.snapshot()
        assert (status.pools, status.workers) == ((), ())
    lines = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(lines) == 2
    assert all("And so are 199 more." in line for line in lines)
