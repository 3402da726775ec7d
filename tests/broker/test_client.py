"""Connections, scripts, versions, the status board, and the texts of errors."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from headway.broker import BlockingBroker, Broker, open_broker
from headway.broker.client.learner import Owner
from headway.broker.connection.connection import without_password
from headway.broker.errors import (
    BrokerError,
    BrokerUnavailableError,
    FencedError,
    RunNotFoundError,
    VersionRegressionError,
)
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import encode

from .scenario import FRESH, begin, groups, manifest, of_another_schema, of_no_run, prompt, rules
from .test_codec import STEP, WORKER


@pytest.mark.parametrize("joins_elsewhere", [False, True], ids=["one task", "another task joins first"])
async def test_who_asks_while_the_run_is_claimed_for_the_first_time_joins_it(
    broker: Broker, url: str, monkeypatch: pytest.MonkeyPatch, joins_elsewhere: bool
) -> None:
    late = await open_broker(url, broker.run)
    join, run = late._connection.join, late._connection._run

    async def join_and_be_overtaken() -> str:
        found = await join()
        if not found:
            await begin(broker, rules(0))
        return found

    async def run_and_be_overtaken(*call: Any, **how: Any) -> Any:
        try:
            return await run(*call, **how)
        except ResponseError:
            if joins_elsewhere:
                await join()
            raise

    monkeypatch.setattr(late._connection, "join", join_and_be_overtaken)
    monkeypatch.setattr(late._connection, "_run", run_and_be_overtaken)
    assert (await late.status.snapshot()).state == "claimed"
    await late.close()


async def test_nobody_answers() -> None:
    with pytest.raises(BrokerUnavailableError) as caught:
        await open_broker("redis://me:secret@127.0.0.1:1/0", "r", timeout_s=0.1)
    text = str(caught.value)
    assert "redis://***@127.0.0.1:1/0 within 0.1 s" in text
    assert "headway broker" in text
    assert "secret" not in text


async def test_a_server_that_stops_answering(server: EmbeddedServer, run_name: str) -> None:
    broker = await open_broker(server.url, run_name, timeout_s=0.2)
    server.stop()
    with pytest.raises(BrokerUnavailableError, match="No answer from the broker"):
        await broker.status.state()
    server.start()
    assert await broker.status.state() == "absent"
    await broker.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("rediss://:p@ss@h:1", "rediss://***@h:1"),
        ("unix:///a/b.sock?password=x", "unix:///a/b.sock"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


async def test_bad_urls_and_names() -> None:
    with pytest.raises(BrokerError, match=r"no broker URL .* Use redis://host:port"):
        await open_broker("http://127.0.0.1", "r")
    for name in ("", "a b", "{x}", "a:b", "-x", "x" * 101, "é"):
        with pytest.raises(BrokerError, match="is no name for a run"):
            await open_broker("redis://127.0.0.1", name)


@pytest.mark.parametrize("url", ["redis://[::1", "redis://me:secret@[::1"])
async def test_half_an_address(url: str) -> None:
    with pytest.raises(BrokerError, match=r"\[::1' is no broker URL .* Use redis://host:port") as caught:
        await open_broker(url, "r")
    assert "secret" not in str(caught.value)


async def test_something_else_answers() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match="answers, but not as a Redis or Valkey server"):
            await open_broker(f"redis://127.0.0.1:{port}", "r", timeout_s=5)


async def test_a_server_that_may_not_write_is_waited_for(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(0))
    await broker._connection.execute("REPLICAOF", "127.0.0.1", "1")
    await broker._connection.execute("CONFIG", "SET", "replica-serve-stale-data", "yes")
    for verb in (run.announce(1), broker.status.leave("w")):
        with pytest.raises(BrokerUnavailableError, match="takes no commands now: READONLY You can't write"):
            await verb
    await broker._connection.execute("CONFIG", "SET", "replica-serve-stale-data", "no")
    with pytest.raises(BrokerUnavailableError, match="takes no commands now: MASTERDOWN Link with MASTER is down"):
        await broker.status.state()
    await broker._connection.execute("REPLICAOF", "NO", "ONE")
    await run.announce(1)


async def test_a_full_disk_is_waited_for(broker: Broker, tmp_path: Path) -> None:
    run = await begin(broker, rules(0))
    await broker._connection.execute("CONFIG", "SET", "save", "3600 1000000")
    (tmp_path / "server" / "dump.rdb").mkdir()  # a snapshot cannot be written here
    await broker._connection.execute("BGSAVE")
    while "err" not in str(await broker._connection.execute("INFO", "persistence")):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(BrokerUnavailableError, match="takes no commands now: MISCONF"):
        await run.announce(1)
    (tmp_path / "server" / "dump.rdb").rmdir()
    await broker._connection.execute("SAVE")
    await run.announce(1)


async def test_functions_are_loaded_again_after_a_flush(broker: Broker) -> None:
    run = await begin(broker, rules(0))
    reply = await run.lease(4, 0)
    await broker._connection.execute("FUNCTION", "FLUSH")
    await run.submit_all(reply.leases, 0)
    await broker._connection.execute("FUNCTION", "FLUSH")
    assert await run.take(0) == groups(0, 1)


async def test_versions_only_go_forward(broker: Broker) -> None:
    run = await begin(broker, rules(0))
    versions = broker.versions
    await versions.announce(run.owner, manifest(1, 0))  # a repeated announcement, whose reply was lost
    await versions.offer(run.owner, manifest(1, 1))
    await versions.offer(run.owner, manifest(1, 1))
    assert await versions.current() == (WeightVersion(1, 1), WeightVersion(1, 0))
    assert of_no_run(await versions.offered()) == manifest(1, 1)
    with pytest.raises(VersionRegressionError, match=r"announced version \(1, 0\) and been offered \(1, 1\)"):
        await versions.offer(run.owner, manifest(1, 0))
    await versions.announce(run.owner, manifest(1, 1))
    assert of_no_run(await versions.announced()) == manifest(1, 1)
    for older in (manifest(1, 0), manifest(0, 9)):
        with pytest.raises(VersionRegressionError):
            await versions.announce(run.owner, older)
    resumed = await begin(broker, rules(0), resume=True)
    assert await versions.current() == (WeightVersion(1, 1), WeightVersion(1, 1))
    with pytest.raises(VersionRegressionError):
        await versions.announce(resumed.owner, manifest(1, 1))  # not this learner's announcement
    with pytest.raises(FencedError):
        await versions.announce(run.owner, manifest(1, 2))
    await versions.announce(resumed.owner, manifest(2, 0))
    assert await versions.current() == (WeightVersion(2, 0), WeightVersion(2, 0))
    assert await broker._connection.scan(broker._connection.keys("stage:*")) == []


async def test_the_status_board(broker: Broker) -> None:
    with pytest.raises(RunNotFoundError, match=rf"No run {broker.run} at unix:.* Runs there: none"):
        await broker.status.snapshot()
    assert await broker.status.config() is None
    run = await begin(broker, rules(1), fed=5)
    files = ModelFiles(files={"config.json": b"{}" * 1000})
    await broker.versions.put_model(run.owner, files)
    assert await broker.versions.model() == files
    assert await broker.status.config() == b"recipe"
    await broker.status.set_state(run.owner, "training")
    await broker.status.heartbeat(WORKER, 30)
    await broker.status.heartbeat(msgspec.structs.replace(WORKER, worker="w2"), 0.001)
    for step in range(515):
        await broker.status.report_step(run.owner, msgspec.structs.replace(STEP, step=step))
    await run.generate(3, 0)
    await run.lease(1, 0)
    seen = await broker.status.snapshot()
    assert (seen.run, seen.state, seen.incarnation) == (broker.run, "training", 1)
    assert (seen.announced, [*map(of_no_run, seen.workers)]) == (WeightVersion(1, 0), [WORKER])
    assert [metrics.step for metrics in seen.recent_steps] == list(range(3, 515))
    assert seen.last_step is not None
    assert seen.last_step.step == 514
    queues = seen.queues
    assert (queues.pool, queues.admitted, queues.ready, queues.open, queues.leased) == (3, 2, 1, 1, 1)
    await broker.status.leave("w1")
    assert await broker.status.workers() == ()
    other = await open_broker(broker.url, "another")
    with pytest.raises(RunNotFoundError, match=f"Runs there: {broker.run}"):
        await other.status.snapshot()
    await other.close()
    assert await broker.status.delete_run() > 0
    assert await broker._connection.scan("*") == []
    assert await broker._connection.execute("FUNCTION", "LIST") == []


async def test_a_heartbeat_of_another_schema_is_passed_over(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    await begin(broker, rules(0))
    for name in ("new", WORKER.worker):
        await broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=name), 30)
    key = broker._connection.keys.hidden("worker:new")
    await broker._connection.execute("SET", key, of_another_schema(await broker._connection.execute("GET", key)))
    for _ in range(2):
        assert [of_no_run(info) for info in await broker.status.workers()] == [WORKER]
    assert [*map(of_no_run, (await broker.status.snapshot()).workers)] == [WORKER]
    assert caplog.text.count("worker new is passed over") == 1
    assert "this is schema" in caplog.text


async def test_names_and_reports_that_are_no_workers_are_passed_over(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await begin(broker, rules(0))
    await broker.status.heartbeat(WORKER, 30)
    say = broker._connection.script
    for name in (b"\xff", "[/]", "\x1b[2J", "", "a:b", "x" * 101):
        with pytest.raises(BrokerError, match="worker"):
            await say("heartbeat", name, "s", 30_000, encode(WORKER), 1)
    await say("heartbeat", "w9", "s", 30_000, encode(msgspec.structs.replace(WORKER, worker="\x1b[2J")), 1)
    await say("heartbeat", "w8", "s", 30_000, b"no frame", 1)
    for _ in range(2):
        assert [info.worker for info in await broker.status.workers()] == [WORKER.worker]
    assert "\x1b" not in caplog.text
    assert "Worker w9 is passed over" in caplog.text
    usage = await broker.usage.read()
    assert usage is not None
    assert usage.workers == 3  # named and alive, whatever they report


async def test_a_worker_without_a_name_is_refused_and_its_errors_are_text(broker: Broker) -> None:
    await begin(broker, rules(0))
    for name in ("", "a b", "[/]", "\x1b", "a:b", "\udcff", "x" * 101):
        with pytest.raises(BrokerError, match="is no name for a worker"):
            await broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=name), 30)
    await broker.status.heartbeat(msgspec.structs.replace(WORKER, last_error="\udcff" + "x" * 10_000), 30)
    (info,) = await broker.status.workers()
    assert info.last_error.startswith("\\udcffxxx")
    assert len(info.last_error) < 3000


async def test_keys_that_are_no_text_are_none_of_ours(broker: Broker) -> None:
    await begin(broker, rules(0))
    await broker._connection.execute("SET", b"headway:{\xff}:verbs", "x")
    await broker._connection.execute("SET", "headway:{[/]}:verbs", "x")
    assert await broker.status.runs() == (broker._connection.run,)


async def test_an_out_of_memory_server_says_so_and_commits_still_free(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "small") as server:
        broker = await open_broker(server.url, "r")
        run = await begin(broker, rules(0))
        await run.generate(4, 0)
        assert await run.take(0) == groups(0, 1)
        await broker._connection.execute("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(BrokerError, match=r"out of memory.*raise its maxmemory, or lower broker.max_bytes"):
            await broker.prompts.feed([prompt(100)], run.owner)
        assert await run.take(0) == groups(0, 1)
        assert await broker.batches.commit(run.owner, 1) == 2
        await broker.close()


def test_closing_the_blocking_facade_ends_what_other_threads_wait_for(url: str, run_name: str) -> None:
    blocking, said = BlockingBroker(url, run_name), list[str]()
    waits = threading.Event()

    async def wait_for_ever() -> None:
        waits.set()
        await asyncio.Event().wait()

    def call() -> None:
        with pytest.raises(BrokerError) as caught:
            blocking.call(wait_for_ever())
        said.append(str(caught.value))

    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(240)
    blocking.close()
    thread.join(240)
    call()
    assert said == [f"The connection to the broker at {without_password(url)} has been closed: open another one."] * 2


def test_the_blocking_facade(url: str, run_name: str) -> None:
    blocking = BlockingBroker(url, run_name)
    claim = blocking.call(blocking.broker.batches.claim(checkpoint=FRESH, rules=rules(0), config=b"", resume=False))
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(blocking.call(blocking.broker.status.state())))
    thread.start()
    thread.join()
    assert seen == ["claimed"]
    with pytest.raises(FencedError):
        blocking.call(blocking.broker.batches.take(Owner(claim.owner.incarnation, "foreign"), 0, 1))
    blocking.close()
    blocking.close()
    with pytest.raises(BrokerUnavailableError):
        BlockingBroker("unix:///nowhere/at/all.sock", run_name, timeout_s=0.1)


@pytest.mark.filterwarnings(
    "ignore:unclosed resource:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_client_closes_though_a_connection_of_it_is_left(server: EmbeddedServer, run_name: str) -> None:
    blocking = BlockingBroker(server.url, run_name)
    path = server.url.removeprefix("unix://").partition("?")[0].rpartition("@")[2]

    async def connect() -> object:
        return await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, path)

    left = blocking.call(connect())
    closing = threading.Thread(target=blocking.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert left
