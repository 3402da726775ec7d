"""Turns to swap weights: never all serving workers have one, and none keeps it beyond its deadline."""

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from headway.broker import Broker, open_broker
from headway.broker.errors import BrokerUnavailableError
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, rules
from .test_codec import WORKER

LONG_S, A_MOMENT_S = 1000.0, 0.05

HOLDER = """
import asyncio, sys
from headway.broker import open_broker

async def hold(url, run):
    broker = await open_broker(url, run)
    assert await broker.swap_turns.take("holder", 0.5, 1)
    print("holds", flush=True)
    while await broker.swap_turns.renew("holder", 1):
        await asyncio.sleep(0.05)
    print("lost", flush=True)

asyncio.run(hold(*sys.argv[1:]))
"""
"""The source of a worker that swaps for ever, and notices when its turn has ended."""


@pytest.fixture
async def broker(broker: Broker) -> Broker:
    """Return the broker of a run that a learner has claimed."""
    await begin(broker, rules(0))
    return broker


async def serve(broker: Broker, *workers: str, ttl_s: float = LONG_S, **changes: object) -> None:
    for worker in workers:
        await broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=worker, **changes), ttl_s)


async def granted(broker: Broker, count: int, share: float = 0.5) -> list[str]:
    """Return the tokens that hold a turn after so many have asked at once."""
    tokens = [f"t{number}" for number in range(count)]
    answers = await asyncio.gather(*[broker.swap_turns.take(token, share, LONG_S) for token in tokens])
    return [token for token, answer in zip(tokens, answers, strict=True) if answer]


async def until_granted(broker: Broker, token: str) -> None:
    async with asyncio.timeout(240):
        while not await broker.swap_turns.take(token, 0.5, LONG_S):  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("workers", "share", "at_once"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 1), (5, 0.5, 2), (10, 0.99, 9)],
)
async def test_so_many_swap_at_once_and_no_more(broker: Broker, workers: int, share: float, at_once: int) -> None:
    await serve(broker, *(f"w{number}" for number in range(workers)))
    assert len(await granted(broker, workers, share)) == at_once


async def test_a_pool_that_was_never_heard_of_swaps_one_by_one(broker: Broker) -> None:
    assert len(await granted(broker, 3)) == 1


async def test_a_turn_is_kept_by_its_token_and_passed_on_when_given_back(broker: Broker) -> None:
    await serve(broker, "w1", "w2", "w3")
    turns = broker.swap_turns
    assert await turns.take("a", 0.5, LONG_S)
    assert await turns.take("a", 0.5, LONG_S)  # repeated after a lost reply
    assert await turns.renew("a", LONG_S)
    assert not await turns.take("b", 0.5, LONG_S)
    assert not await turns.renew("b", LONG_S)
    await turns.give_back("b")
    assert not await turns.take("b", 0.5, LONG_S)
    await turns.give_back("a")
    assert not await turns.renew("a", LONG_S)
    assert await turns.take("b", 0.5, LONG_S)


async def test_one_after_the_other_all_get_their_turn(broker: Broker) -> None:
    await serve(broker, "w1", "w2", "w3")
    swapping, swapped = set[str](), set[str]()

    async def swap(token: str) -> None:
        await until_granted(broker, token)
        swapping.add(token)
        assert len(swapping) == 1
        await asyncio.sleep(0.02)
        swapping.remove(token)
        swapped.add(token)
        await broker.swap_turns.give_back(token)

    await asyncio.gather(*[swap(token) for token in "abc"])
    assert swapped == set("abc")


async def test_a_turn_ends_at_its_own_deadline(broker: Broker) -> None:
    await serve(broker, "w1", "w2", "w3", "w4")
    assert await broker.swap_turns.take("long", 0.5, LONG_S)
    assert await broker.swap_turns.take("short", 0.5, A_MOMENT_S)
    await until_granted(broker, "third")
    assert not await broker.swap_turns.renew("short", LONG_S)
    assert await broker.swap_turns.renew("long", LONG_S)
    assert not await broker.swap_turns.take("fourth", 0.5, LONG_S)


async def test_a_turn_that_is_renewed_goes_on(broker: Broker) -> None:
    await serve(broker, "w1", "w2")
    assert await broker.swap_turns.take("a", 0.5, 0.5)
    assert await broker.swap_turns.renew("a", LONG_S)
    await asyncio.sleep(0.5)
    assert not await broker.swap_turns.take("b", 0.5, LONG_S)


async def test_turns_follow_the_size_of_the_pool(broker: Broker) -> None:
    await serve(broker, "w1", "w2", "w3")
    assert await granted(broker, 4) == ["t0"]
    await serve(broker, "w4")  # a worker joins
    assert await granted(broker, 4) == ["t0", "t1"]
    await broker.status.leave("w1")  # a worker leaves: the swapping one goes on, no other begins
    await broker.swap_turns.give_back("t0")
    assert await granted(broker, 4) == ["t1"]
    await serve(broker, "w5", ttl_s=A_MOMENT_S)  # a worker joins and dies
    while (await broker.status.workers())[-1].worker == "w5":  # noqa: ASYNC110 - the server announces nothing
        await asyncio.sleep(A_MOMENT_S)
    assert await granted(broker, 4) == ["t1"]
    assert await broker._connection.execute("SCARD", broker._connection.keys.hidden("serving")) == 3


async def test_who_has_no_weights_or_drains_does_not_serve(broker: Broker) -> None:
    await serve(broker, "w1", "w2")
    await serve(broker, "w3", "w4", version=None, state="starting")
    await serve(broker, "w5", "w6", state="draining")
    assert len(await granted(broker, 4)) == 1
    await serve(broker, "w3", "w4")
    assert len(await granted(broker, 4)) == 2
    await serve(broker, "w3", "w4", state="draining")
    await broker.swap_turns.give_back("t0")
    assert await granted(broker, 4) == ["t1"]


async def test_a_stopped_holder_costs_its_deadline_only(broker: Broker) -> None:
    await serve(broker, "w1", "w2")
    program = [sys.executable, "-c", HOLDER, broker.url, broker.run]
    holder = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"holds\n"
        assert not await broker.swap_turns.take("other", 0.5, LONG_S)
        os.kill(holder.pid, signal.SIGSTOP)
        await until_granted(broker, "other")
        os.kill(holder.pid, signal.SIGCONT)
        assert await holder.stdout.readline() == b"lost\n"
        assert await holder.wait() == 0
    finally:
        if holder.returncode is None:
            holder.kill()
            await holder.wait()


async def test_a_dead_workers_turn_ends_at_once_and_no_other_one(broker: Broker, server: EmbeddedServer) -> None:
    dead = await open_broker(server.url, broker.run)
    await serve(broker, "w1", "w2")
    await serve(dead, "w3", "w4")
    assert await dead.swap_turns.take("w3:a", 0.5, LONG_S)
    assert await broker.swap_turns.take("w1:a", 0.5, LONG_S)
    assert not await broker.swap_turns.take("w2:a", 0.5, LONG_S)
    assert await broker.leases.report_death("f" * 32) == 0
    assert not await broker.swap_turns.take("w2:a", 0.5, LONG_S)
    assert await broker.leases.report_death(dead.session) == 0
    assert await broker.swap_turns.take("w2:a", 0.5, LONG_S)
    assert await broker.swap_turns.renew("w1:a", LONG_S)
    assert not await dead.swap_turns.renew("w3:a", LONG_S)
    await dead.close()


async def test_turns_leave_nothing_behind(broker: Broker) -> None:
    await serve(broker, "w1")
    await broker.swap_turns.take("t", 0.5, A_MOMENT_S)
    key = broker._connection.keys.hidden("turns:others")
    assert 0 < await broker._connection.execute("PTTL", key) <= 3000
    await broker.swap_turns.give_back("t")
    assert await broker._connection.execute("EXISTS", key) == 0


async def test_a_server_that_is_away_grants_nothing_and_says_so(server: EmbeddedServer, run_name: str) -> None:
    broker = Broker(server.url, run_name, timeout_s=0.2)
    server.stop()
    with pytest.raises(BrokerUnavailableError):
        await broker.swap_turns.take("t", 0.5, LONG_S)
    await broker.close()
