"""Verbs share round trips: each gets its own reply or error, and none waits for work that only others need."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from headway.broker import Broker, open_broker
from headway.broker.connection.connection import Connection
from headway.broker.connection.function_library import FILES, script_source, verb_flags
from headway.broker.errors import BrokerError, BrokerUnavailableError
from headway.broker.server.embedded import EmbeddedServer
from tests.processes import kill

from .scenario import begin, groups, rules
from .test_codec import WORKER
from .topologies import Proxy, ask, free_port, is_redis_7_0, port_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "server", port=free_port()) as running:
        yield running


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(port_of(server)) as running:
        yield running


@pytest.fixture
async def connection(proxy: Proxy, run_name: str) -> AsyncIterator[Connection]:
    opened = Connection(f"redis://127.0.0.1:{proxy.port}", run_name, 10)
    yield opened
    await opened.close()


async def test_concurrent_verbs_share_round_trips(connection: Connection) -> None:
    async def reads() -> int:
        (found,) = re.findall(rb"total_reads_processed:(\d+)", await connection.execute("INFO", "stats"))
        return int(found)

    before = await reads()
    await asyncio.gather(*(connection.execute("PING") for _ in range(640)))
    assert await reads() - before < 320


async def test_everybody_gets_his_own_reply(connection: Connection) -> None:
    keys = connection.keys

    async def write_and_read(number: int) -> list[object]:
        payload = str(number).encode() * 20_000
        replies = await connection.pipeline([("SET", keys(f"k{number}"), payload), ("GET", keys(f"k{number}"))])
        return [payload, *replies]

    for payload, stored, read in await asyncio.gather(*map(write_and_read, range(100))):
        assert stored
        assert read == payload


async def test_an_error_is_its_callers(connection: Connection) -> None:
    text, number = connection.keys("text"), connection.keys("number")
    await connection.execute("SET", text, "x")
    replies = await asyncio.gather(
        *(connection.execute("INCR", key) for key in [number, text] * 20), return_exceptions=True
    )
    assert sorted(replies[::2]) == list(range(1, 21))  # type: ignore[type-var]
    assert {type(reply) for reply in replies[1::2]} == {BrokerError}


async def test_cancelling_one_leaves_the_others(connection: Connection, proxy: Proxy) -> None:
    await connection.execute("PING")
    proxy.stall()
    tasks = [asyncio.create_task(connection.execute("ECHO", str(number))) for number in range(100)]
    await asyncio.sleep(0.05)  # some verbs are on their way, the rest waits
    for task in tasks[::2]:
        task.cancel()
    proxy.resume()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(reply, asyncio.CancelledError) for reply in replies[::2])
    assert replies[1::2] == [str(number).encode() for number in range(1, 100, 2)]


async def test_a_heartbeat_that_was_given_up_brings_nobody_back(
    proxy: Proxy, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await open_broker(f"redis://127.0.0.1:{proxy.port}", run_name)
    await begin(broker, rules(1))
    await broker.status.heartbeat(WORKER, 60)
    script, sent = broker._connection.script, list[str]()

    def noted(name: str, *arguments: Any, **others: Any) -> Coroutine[Any, Any, Any]:
        sent.append(name)
        return script(name, *arguments, **others)

    monkeypatch.setattr(broker._connection, "script", noted)
    proxy.stall()
    beating = asyncio.create_task(broker.status.heartbeat(WORKER, 60))
    await asyncio.sleep(0.05)
    beating.cancel()
    leaving = asyncio.create_task(broker.status.leave(WORKER.worker))
    await asyncio.sleep(0.05)
    assert sent == ["heartbeat"]
    proxy.resume()
    await leaving
    assert await broker.status.workers() == ()
    await broker.close()


async def test_cut_connections_cost_nothing_but_another_attempt(connection: Connection, proxy: Proxy) -> None:
    async def write(number: int) -> None:
        for step in range(20):
            await connection.execute("SET", connection.keys(f"{number}"), step)

    writing = asyncio.gather(*(write(number) for number in range(64)))
    for _ in range(3):
        await asyncio.sleep(0.02)
        proxy.cut()
    await writing
    values = await connection.pipeline([("GET", connection.keys(f"{number}")) for number in range(64)])
    assert values == [b"19"] * 64


async def test_a_network_that_carries_nothing(proxy: Proxy, run_name: str) -> None:
    broker = await open_broker(f"redis://127.0.0.1:{proxy.port}", run_name, timeout_s=0.3)
    proxy.stall()
    states = await asyncio.gather(*(broker.status.state() for _ in range(100)), return_exceptions=True)
    assert {type(state) for state in states} == {BrokerUnavailableError}
    proxy.resume()
    assert await broker.status.state() == "absent"
    await broker.close()


async def test_a_process_that_ends_waits_once_for_a_server_that_is_away(run_name: str) -> None:
    is_ending = asyncio.Event()
    broker = Broker(f"redis://127.0.0.1:{free_port()}", run_name, timeout_s=10_000)
    broker.end_when(is_ending.is_set, patience_s=0.1)
    waiting = asyncio.create_task(broker.ping())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.3)
    is_ending.set()
    async with asyncio.timeout(240):
        with pytest.raises(BrokerUnavailableError):
            await waiting
        with pytest.raises(BrokerUnavailableError):
            await broker.ping()
        await broker.close()


@contextmanager
def killed(server: EmbeddedServer) -> Iterator[None]:
    kill(server)
    yield
    server.start()


@contextmanager
def hung(server: EmbeddedServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("outage", [killed, hung])
async def test_a_process_that_ends_asks_a_server_that_answers_again(
    server: EmbeddedServer, run_name: str, outage: Callable[[EmbeddedServer], AbstractContextManager[None]]
) -> None:
    broker = await open_broker(server.url, run_name, timeout_s=10_000)
    broker.end_when(lambda: True, patience_s=0.1)
    async with asyncio.timeout(240):
        with outage(server):
            for _ in range(2):
                with pytest.raises(BrokerUnavailableError, match="No answer") as caught:
                    await broker.ping()
                assert "within 10000 s" not in str(caught.value)
        while True:
            with suppress(BrokerUnavailableError):  # a slow machine
                await broker.ping()
                break
            await asyncio.sleep(0.02)
    await broker.close()


@pytest.mark.parametrize("answered", ["ECHO", "INCR"])
async def test_any_answer_renews_the_patience_of_a_process_that_ends(
    connection: Connection, proxy: Proxy, answered: str
) -> None:
    text = connection.keys("text")
    await connection.execute("SET", text, "x")
    connection.end_when(lambda: True, patience_s=1)
    proxy.stall()
    with pytest.raises(BrokerUnavailableError):
        await connection.execute("PING")
    proxy.resume()
    with nullcontext() if answered == "ECHO" else pytest.raises(BrokerError, match="refused"):
        await connection.execute(answered, text)
    proxy.stall()
    cut_off = asyncio.create_task(connection.execute("PING"))
    await asyncio.sleep(0.05)
    proxy.cut()
    proxy.resume()
    await cut_off


async def test_closing_cancels_who_still_waits(proxy: Proxy, run_name: str) -> None:
    connection = Connection(f"redis://127.0.0.1:{proxy.port}", run_name, 10)
    await connection.execute("PING")
    proxy.stall()
    tasks = [asyncio.create_task(connection.execute("PING")) for _ in range(100)]
    await asyncio.sleep(0.05)
    await connection.close()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*tasks, return_exceptions=True))


async def test_waiting_for_durability_holds_up_nobody(connection: Connection) -> None:
    waiting = asyncio.create_task(connection.make_durable(replicas=1, timeout_ms=5000))  # the server has no replica
    await asyncio.gather(*(connection.execute("PING") for _ in range(20)))
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_is_on_disk_is_durable(connection: Connection, server: EmbeddedServer) -> None:
    assert await connection.make_durable(replicas=0, timeout_ms=4000) != is_redis_7_0(server)
    ask(server, "CONFIG", "SET", "appendonly", "no")
    assert not await connection.make_durable(replicas=0, timeout_ms=100)  # the server cannot tell


async def test_functions_that_the_server_forgot_come_with_their_text(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(0))
    ask(server, "FUNCTION", "FLUSH")
    await run.generate(4, 0)
    ask(server, "FUNCTION", "FLUSH")
    await broker._connection.load_verbs()
    assert {"lease", "submit", "take"} <= set(verb_flags())
    assert not [name for name in FILES if re.search(r"^local [a-z_]+$", script_source(name), re.M)], "kept for ever"
    assert await run.take(0) == groups(0, 1)
