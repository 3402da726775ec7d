"""The learner finds and frees everything that a hostile worker stores; the blobs of honest workers stay."""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, OutOfMemoryError

from headway.broker import Broker, open_broker
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.errors import BrokerUnavailableError, FencedError
from headway.broker.keys import Keys
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.broker.security import garbage_collection
from headway.broker.security.garbage_collection import FreedKeys
from headway.broker.server.access import Role, User
from headway.broker.server.embedded import EmbeddedServer

from .scenario import FRESH, Scenario, begin, broadcast_group, groups, rules
from .test_access import admit, segment, url_of
from .test_rendezvous_store import WORKER
from .topologies import Cluster, ask

MAX_BYTES = 24 << 20
MODEL = ModelFiles(files={"model": b"m" * 1_000_000})
BLOB = "0000-00000000:0:0"
PIECE = b"j" * (1 << 16)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "server", maxmemory_bytes=MAX_BYTES) as running:
        yield running


class Pair:
    """A learner and an honest worker, each as its own user, and a hostile client with the worker's password."""

    def __init__(self, run: Scenario, worker: Broker, hostile: Any) -> None:
        self.run, self.hostile = run, hostile
        self.learner = run.broker
        self.worker = Scenario(worker, run.claim)
        self.keys = Keys(run.broker.run)

    async def sweep(self, *, is_short: bool = False) -> FreedKeys:
        return await self.learner.garbage.collect(self.run.owner, is_short=is_short)


@pytest.fixture
async def pair(server: EmbeddedServer, run_name: str) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield await meet(stack, server, run_name, admit(server, None))


async def meet(stack: AsyncExitStack, server: EmbeddedServer, name: str, made: dict[Role, User]) -> Pair:
    learner = await open_broker(url_of(server, made[Role.LEARNER]), name)
    stack.push_async_callback(learner.close)
    worker = await open_broker(url_of(server, made[Role.WORKER]), name)
    stack.push_async_callback(worker.close)
    hostile = redis.Redis.from_url(url_of(server, made[Role.WORKER]))
    stack.callback(hostile.close)
    return Pair(await begin(learner, rules(8), fed=40), worker, hostile)


def everywhere(kind: str) -> Callable[[Pair, int], tuple[Any, ...]]:
    """Return the command by which a hostile worker stores piece `n` of this kind."""
    return {
        "hidden": lambda pair, n: ("SET", pair.keys(f"hidden:{n}"), PIECE),
        "hidden hash": lambda pair, n: ("HSET", pair.keys("hidden:h"), n, PIECE),
        "kept payload": lambda pair, n: ("SET", pair.keys(f"payload:{BLOB}:{n}"), PIECE),
        "lasting payload": lambda pair, n: ("SET", pair.keys(f"payload:{BLOB}:{n}"), PIECE, "EX", 100_000),
        "fresh payload": lambda pair, n: ("SET", pair.keys(f"payload:{BLOB}:{n}"), PIECE, "EX", 600),
        "fresh segment": lambda pair, n: ("SET", pair.keys(f"segment:{BLOB}:{n}"), PIECE, "EX", 600),
        "nameless payload": lambda pair, n: ("SET", pair.keys(f"payload:{n}"), PIECE),
        "no text": lambda pair, n: ("SET", pair.keys("payload:").encode() + b"\xff\x00" + b"%d" % n, PIECE),
        "durable": lambda pair, n: ("SET", pair.keys("durable"), PIECE * (256 * (n + 1))),
        "fault": lambda pair, n: ("SET", pair.keys("fault:0"), PIECE * (256 * (n + 1)), "EX", 60),
        "fresh on a shard": lambda pair, n: ("SET", pair.keys.blob(f"1/payload:{BLOB}:{n}"), PIECE, "EX", 600),
        "kept on a shard": lambda pair, n: ("SET", pair.keys.blob(f"1/segment:{BLOB}:{n}"), PIECE),
        "hidden on a shard": lambda pair, n: ("HSET", pair.keys.blob(f"1/hidden:{n}"), "x", PIECE),
        "durable on a shard": lambda pair, n: ("SET", pair.keys.blob("1/durable"), PIECE * (256 * (n + 1))),
        "no run": lambda _, n: ("SET", f"headway:{{other}}:payload:{n}", PIECE, "EX", 600),
        "no name": lambda _, n: ("SET", f"headway:{{}}:hidden:{n}", PIECE),
        "two braces": lambda pair, n: ("SET", pair.keys(f"meeting:}}:payload:{n}"), PIECE),
    }[kind]


KINDS = """hidden/hidden hash/kept payload/lasting payload/fresh payload/fresh segment/nameless payload/no text/durable
fault/fresh on a shard/kept on a shard/hidden on a shard/durable on a shard/no run/no name/two braces"""


async def fill(pair: Pair, kind: str) -> None:
    """Fill the server until it takes nothing more from the learner."""
    piece = everywhere(kind)
    for n in itertools.count():
        try:
            pair.hostile.execute_command(*piece(pair, n))
        except OutOfMemoryError:
            with suppress(BrokerUnavailableError):
                await pair.learner.versions.put_model(pair.run.owner, MODEL)
                continue  # the server had room for this
            return


async def go_on(pair: Pair) -> None:
    """Wait until the learner writes again, and a worker hands in a leased sample."""
    async with asyncio.timeout(240):
        while True:
            with suppress(BrokerUnavailableError):
                await pair.learner.versions.put_model(pair.run.owner, MODEL)
                (lease,) = (await pair.worker.lease(1, 0)).leases
                assert await pair.worker.submit(lease, 0) is SubmitOutcome.ACCEPTED
                return
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for line in KINDS.split("\n") for kind in line.split("/")])
async def test_a_full_server_has_room_again(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "_SHORT_PATIENCE_S", 0.5)
    await fill(pair, kind)
    await pair.learner.garbage.begin(pair.run.owner)
    await go_on(pair)
    assert (await pair.run.queues()).rejected == 0


async def test_it_is_found_while_the_learner_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeping had begun before; a refused write starts the next sweep early."""
    monkeypatch.setattr(garbage_collection, "_LOOK_S", 1000.0)
    await pair.learner.garbage.begin(pair.run.owner)
    await asyncio.sleep(0.2)
    for kind in ("hidden", "fresh payload"):
        await fill(pair, kind)
        await go_on(pair)


async def test_it_is_found_before_anybody_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "_LOOK_S", 0.05)
    await pair.learner.garbage.begin(pair.run.owner)
    await asyncio.sleep(0.2)
    with suppress(OutOfMemoryError):
        for n in itertools.count():
            pair.hostile.execute_command(*everywhere("hidden")(pair, n))
    async with asyncio.timeout(240):
        while pair.hostile.exists(pair.keys("hidden:0")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_full_server_that_restarted_is_swept_before_it_is_told_anything(
    pair: Pair, server: EmbeddedServer
) -> None:
    users = ask(server, "ACL", "LIST")
    await fill(pair, "hidden")
    server.stop()
    server.start()
    for line in users:
        _, name, *rules_of_it = (line.decode() if isinstance(line, bytes) else line).split(" ")
        ask(server, "ACL", "SETUSER", name, "reset", *_grouped(rules_of_it))
    await pair.learner.garbage.begin(pair.run.owner)
    async with asyncio.timeout(240):
        while True:
            with suppress(BrokerUnavailableError):
                await pair.learner.batches.reassert(
                    pair.run.owner, announced=WeightVersion(1, 0), committed_groups=[], pinned={}
                )
                break
            await asyncio.sleep(0.1)
    await go_on(pair)


async def test_a_learner_takes_over_a_run_on_a_full_server(pair: Pair, server: EmbeddedServer, run_name: str) -> None:
    await fill(pair, "fresh payload")
    async with AsyncExitStack() as stack:
        learner = await open_broker(pair.learner.url, run_name)
        stack.push_async_callback(learner.close)
        claim = await learner.batches.claim(checkpoint=FRESH, rules=rules(8), config=b"recipe", resume=True)
        with pytest.raises(BrokerUnavailableError, match="out of memory"):
            await learner.versions.put_model(claim.owner, MODEL)
        await learner.garbage.begin(claim.owner)
        await learner.versions.put_model(claim.owner, MODEL)


def _grouped(words: list[str]) -> Iterator[str]:
    """Join the words of each selector."""
    open_ones = list[str]()
    for word in words:
        open_ones.append(word)
        if " ".join(open_ones).count("(") == " ".join(open_ones).count(")"):
            yield " ".join(open_ones)
            open_ones.clear()


async def test_it_is_told_what_to_do(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway.broker")
    for n in range(3):
        pair.hostile.execute_command(*everywhere("hidden")(pair, n))
    await pair.learner.garbage.begin(pair.run.owner)
    async with asyncio.timeout(240):
        while "uses a worker's password" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert "3 of 3 keys" in caplog.text
    assert "passwords/worker" in caplog.text


async def test_the_embedded_server_obeys_a_new_password(tmp_path: Path, run_name: str) -> None:
    """The test does what the message asks: it deletes the file while the server is stopped."""
    server = EmbeddedServer(tmp_path / "own", has_users=True)
    password = tmp_path / "own" / "passwords" / "worker"
    with server:
        old = password.read_text().strip()
    password.unlink()
    with server:
        with redis.Redis.from_url(server.url) as client, pytest.raises(AuthenticationError):
            client.execute_command("AUTH", "headway-worker", old)
        worker = await open_broker(server.url_of(Role.WORKER), run_name)
        await worker.close()


async def test_a_server_of_ones_own_obeys_new_rules(server: EmbeddedServer, pair: Pair) -> None:
    """Only CLIENT KILL ends connections from before."""
    pair.hostile.execute_command("SET", pair.keys("payload:x"), b"x")
    admit(server, None)
    ask(server, "CLIENT", "KILL", "USER", "headway-worker")
    with pytest.raises((AuthenticationError, redis.ConnectionError)):
        pair.hostile.execute_command("SET", pair.keys("payload:x"), b"x")


def names(server: EmbeddedServer) -> set[bytes]:
    return set(ask(server, "KEYS", "*"))


async def test_what_a_worker_has_stored_stays_for_a_minute(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("fresh payload", "fresh segment", "fresh on a shard"):
        pair.hostile.execute_command(*everywhere(kind)(pair, 0))
    assert await pair.sweep() == FreedKeys()
    monkeypatch.setattr(garbage_collection, "_PATIENCE_S", 0.0)
    swept = await pair.sweep()
    assert (swept.keys, swept.foreign) == (3, 0)  # a worker that has died may have left them
    assert swept.bytes > 3 * len(PIECE)


@pytest.mark.parametrize("shards", [1, 2])
async def test_what_is_recorded_stays(
    server: EmbeddedServer, pair: Pair, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob loses the time to live that a worker left when it died while it handed in once more."""
    monkeypatch.setattr(garbage_collection, "_SHORT_PATIENCE_S", 0.01)
    pair.worker.broker.leases.storage.payload_shards = shards
    await pair.worker.generate(3, 0)
    (lease,) = (await pair.worker.lease(1, 0)).leases
    reply = await pair.worker.broker.leases.append(lease, segment(lease, 0), 30)
    assert reply.outcome is AppendOutcome.APPENDED
    await pair.learner.versions.put_group(pair.run.owner, broadcast_group())
    blobs = [name for name in names(server) if b":payload:" in name or b":segment:" in name]
    assert len(blobs) == 4
    for name in blobs:
        assert ask(server, "EXPIRE", name, 300)
    before = names(server)
    assert await pair.sweep(is_short=True) == FreedKeys()
    assert names(server) == before
    assert {ask(server, "PTTL", name) for name in blobs} == {-1}


@pytest.mark.parametrize("shards", [1, 2])
async def test_what_is_larger_than_it_was_said_to_be_is_generated_anew(
    server: EmbeddedServer, pair: Pair, shards: int
) -> None:
    pair.worker.broker.leases.storage.payload_shards = shards
    await pair.worker.generate(4, 0)
    name = next(name for name in names(server) if b":payload:" in name)
    pair.hostile.set(name, PIECE)
    assert (await pair.sweep()).foreign == 1
    assert await pair.run.take(0) is None
    await pair.worker.generate(1, 0)
    assert sorted(await pair.run.take(0) or ()) == groups(0, 1)
    assert (await pair.learner.status.snapshot()).quarantined == ()


async def test_many_segments_of_one_sample_hold_up_nobody(pair: Pair, server: EmbeddedServer) -> None:
    """They stay up to the number that one sample can have."""
    (lease,) = (await pair.worker.lease(1, 0)).leases
    assert (await pair.worker.broker.leases.append(lease, segment(lease, 0), 30)).outcome is AppendOutcome.APPENDED
    (queue,) = [name for name in names(server) if b":segments:" in name]
    (first,) = ask(server, "LRANGE", queue, 0, -1)
    with redis.Redis.from_url(server.url) as client, client.pipeline(transaction=False) as pipe:
        for n in range(1, 12_000):
            name = b"segment:%s:x%d" % (str(lease.tid).encode(), n)
            pipe.rpush(queue, b" ".join([name, *first.split(b" ")[1:]]))
            pipe.set(pair.keys("").encode() + name, b"x")
        pipe.execute()
    assert (await pair.sweep()).foreign == 2_000
    assert (await pair.sweep()).foreign == 0


async def test_words_of_a_meeting_stay(pair: Pair) -> None:
    worker = pair.worker.broker
    await pair.learner.rendezvous.create("now", ["w"], {})
    await worker.status.heartbeat(WORKER, 30)
    assert await worker.rendezvous.set("now", "w", "in/w", b"1")
    assert await pair.sweep(is_short=True) == FreedKeys()
    assert await worker.rendezvous.get("now", [("w", "in/w")]) == [b"1"]


async def test_another_run_is_left_alone(server: EmbeddedServer, pair: Pair) -> None:
    other = await open_broker(server.url, "another")
    try:
        run = await begin(other, rules(8))
        other.leases.storage.payload_shards = 2
        await run.generate(4, 0)
        before = names(server)
        pair.hostile.set("headway:{another/1}:payload:x", PIECE)
        assert await pair.sweep(is_short=True) == FreedKeys()
        assert names(server) >= before
        assert await run.take(0) == groups(0, 1)
    finally:
        await other.close()


async def test_a_learner_of_one_run_only_sweeps_that(server: EmbeddedServer, run_name: str) -> None:
    async with AsyncExitStack() as stack:
        pair = await meet(stack, server, run_name, admit(server, run_name))
        ask(server, "SET", "headway:{other}:payload:x", PIECE)
        pair.hostile.execute_command(*everywhere("hidden")(pair, 0))
        pair.hostile.execute_command(*everywhere("kept on a shard")(pair, 0))
        assert (await pair.sweep()).keys == 2
        assert ask(server, "EXISTS", "headway:{other}:payload:x") == 1


async def test_only_the_owner_sweeps(pair: Pair) -> None:
    other = await open_broker(pair.learner.url, pair.learner.run)
    try:
        await other.batches.claim(checkpoint=FRESH, rules=rules(8), config=b"", resume=True)
        pair.hostile.execute_command(*everywhere("hidden")(pair, 0))
        with pytest.raises(FencedError):
            await pair.sweep()
    finally:
        await other.close()


async def traffic(worker: Scenario, run: Scenario, steps: int) -> list[str]:
    """Run honest workers, with some segments and some late samples, to the last group; return the trained groups."""
    rng, trained = random.Random(3), list[str]()
    for step in range(steps):
        while (batch := await run.take(step)) is None:
            for lease in (await worker.lease(rng.randrange(1, 5), step)).leases:
                for index in range(len(lease.segments), rng.randrange(3)):
                    reply = await worker.broker.leases.append(lease, segment(lease, index, step), 30)
                    assert reply.outcome is AppendOutcome.APPENDED
                if rng.random() < 0.2:
                    await worker.broker.leases.release([lease])
                    continue
                assert await worker.submit(lease, step) is SubmitOutcome.ACCEPTED
        trained += batch
        await run.announce(step + 1)
        await run.broker.batches.commit(run.owner, step + 1)
    return trained


async def sweep_again_and_again(run: Scenario) -> None:
    while True:
        await run.broker.garbage.collect(run.owner, is_short=True)


async def undisturbed(worker: Scenario, run: Scenario) -> None:
    """Assert that sweeps at all times leave every handed-in sample to be trained, once."""
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task(sweep_again_and_again(run))
        trained = await traffic(worker, run, 20)
        sweeping.cancel()
    assert sorted(trained) == groups(*range(40))
    queues = await run.queues()
    assert (queues.rejected, queues.payload_bytes) == (0, 0)


@pytest.mark.parametrize("shards", [1, 3])
async def test_honest_work_goes_on_undisturbed(pair: Pair, shards: int) -> None:
    pair.worker.broker.leases.storage.payload_shards = shards
    await undisturbed(pair.worker, pair.run)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 5])
async def test_on_a_cluster(cluster: Cluster, run_name: str, shards: int) -> None:
    """Every node is swept, and no handed-in sample is lost."""
    learner, worker = await open_broker(cluster.url, run_name), await open_broker(cluster.url, run_name)
    try:
        run = await begin(learner, rules(8), fed=40)
        worker.leases.storage.payload_shards = shards
        for shard in range(8):
            for name in (f"{shard}/payload:{BLOB}:x", f"{shard}/hidden:x", f"{shard}/durable"):
                await learner._connection.execute("SET", learner._connection.keys.blob(name), "x")
        await learner._connection.execute("SET", learner._connection.keys("hidden:x"), "x")
        assert (await learner.garbage.collect(run.owner)).foreign == 25
        await undisturbed(Scenario(worker, run.claim), run)
    finally:
        await worker.close()
        await learner.close()
