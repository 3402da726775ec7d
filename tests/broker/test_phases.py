"""Phases of a colocated run: no engine is awake while the learner trains, after deaths, restarts and lost data too."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headway.broker import Broker, open_broker
from headway.broker.client import engine_pauses
from headway.broker.client.learner import Owner
from headway.broker.errors import BrokerUnavailableError, FencedError, ServerRestartedError
from headway.broker.server.embedded import EmbeddedServer
from tests.processes import kill

from .scenario import FRESH, rules

LONG_S, A_MOMENT_S = 1000.0, 0.05


async def claimed(broker: Broker) -> Owner:
    claim = await broker.batches.claim(checkpoint=FRESH, rules=rules(1), config=b"", resume=False)
    return claim.owner


@pytest.fixture
async def impatient(url: str, run_name: str) -> AsyncIterator[Broker]:
    opened = await open_broker(url, run_name, timeout_s=0.3)
    yield opened
    await opened.close()


async def insist(broker: Broker, owner: Owner) -> tuple[str, ...] | None:
    """Call `train` as a learner does."""
    async with asyncio.timeout(240):
        while True:
            try:
                return await broker.phases.train(owner)
            except ServerRestartedError:
                await broker.batches.reassert(owner, announced=None, committed_groups=[], pinned={})
            except BrokerUnavailableError:
                pass


async def until_gone(broker: Broker, owner: Owner) -> None:
    async with asyncio.timeout(240):
        while await broker.phases.train(owner):  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)


async def test_nobody_may_generate_before_a_learner_says_so(broker: Broker) -> None:
    assert not await broker.phases.may_generate("w1", LONG_S, is_awake=False)
    assert not await broker.phases.are_engines_awake()
    owner = await claimed(broker)
    assert not await broker.phases.may_generate("w1", LONG_S, is_awake=False)
    assert await broker.phases.train(owner) == ()


async def test_the_learner_is_told_who_has_not_fallen_asleep(broker: Broker) -> None:
    owner = await claimed(broker)
    await broker.phases.generate(owner, LONG_S)
    for worker in ("w1", "w2"):
        assert await broker.phases.may_generate(worker, LONG_S, is_awake=False)
    assert await broker.phases.are_engines_awake()
    assert await broker.phases.train(owner) == ("w1", "w2")
    assert not await broker.phases.may_generate("w2", 2 * LONG_S, is_awake=True)  # its sleep is still on its way
    assert not await broker.phases.may_generate("w3", LONG_S, is_awake=False)  # a new worker stays out
    await broker.phases.fell_asleep("w1")
    assert await broker.phases.train(owner) == ("w2",)
    await broker.phases.fell_asleep("w2")
    assert await broker.phases.train(owner) == ()
    assert not await broker.phases.may_generate("w2", LONG_S, is_awake=False)
    assert await broker.phases.train(owner) == ()
    assert not await broker.phases.are_engines_awake()


async def test_a_worker_that_is_not_heard_of_is_not_waited_for(broker: Broker) -> None:
    owner = await claimed(broker)
    await broker.phases.generate(owner, LONG_S)
    assert await broker.phases.may_generate("dead", A_MOMENT_S, is_awake=False)
    await until_gone(broker, owner)
    assert not await broker.phases.are_engines_awake()
    assert not await broker.phases.may_generate("dead", LONG_S, is_awake=True)  # stopped, and waited for again
    assert await broker.phases.train(owner) == ("dead",)


async def test_without_a_learner_engines_fall_asleep(broker: Broker) -> None:
    owner = await claimed(broker)
    await broker.phases.generate(owner, A_MOMENT_S)
    async with asyncio.timeout(240):
        while await broker.phases.may_generate("w", LONG_S, is_awake=True):  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)
    assert await broker.phases.are_engines_awake()
    await broker.phases.fell_asleep("w")
    assert not await broker.phases.are_engines_awake()


async def test_a_phase_that_is_renewed_goes_on(broker: Broker) -> None:
    owner = await claimed(broker)
    await broker.phases.generate(owner, 0.3)
    await broker.phases.generate(owner, LONG_S)
    await asyncio.sleep(0.4)
    assert await broker.phases.may_generate("w", LONG_S, is_awake=False)


async def test_an_old_learner_cannot_wake_engines(broker: Broker) -> None:
    old = await claimed(broker)
    new = await claimed(broker)
    with pytest.raises(FencedError):
        await broker.phases.generate(old, LONG_S)
    with pytest.raises(FencedError):
        await broker.phases.train(old)
    await broker.phases.generate(new, LONG_S)


async def test_a_phase_ends_with_the_server_that_it_began_on(broker: Broker, server: EmbeddedServer) -> None:
    """A server may forget that a phase has ended, and must not begin it again."""
    owner = await claimed(broker)
    await broker.phases.generate(owner, LONG_S)
    assert await broker._connection.make_durable(0, 1000)
    kill(server)
    server.start()
    assert await broker._connection.execute("EXISTS", broker._connection.keys.hidden("phase")) == 1
    assert not await broker.phases.may_generate("w", LONG_S, is_awake=False)
    with pytest.raises(ServerRestartedError):
        await broker.phases.generate(owner, LONG_S)


async def comes_back(broker: Broker, owner: Owner, server: EmbeddedServer, directory: Path) -> None:
    kill(server)
    server.start()


async def forgets(broker: Broker, owner: Owner, server: EmbeddedServer, directory: Path) -> None:
    kill(server)
    shutil.rmtree(directory / "appendonlydir")
    server.start()


async def stalls(broker: Broker, owner: Owner, server: EmbeddedServer, directory: Path) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(BrokerUnavailableError):
        await broker.phases.generate(owner, LONG_S)
    os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("outage", [comes_back, forgets, stalls])
async def test_after_an_outage_silence_says_nothing_until_everybody_could_speak(
    broker: Broker,
    impatient: Broker,
    server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outage: Callable[..., object],
) -> None:
    """The server may have forgotten an awake worker, or the worker's time to live may have passed meanwhile."""
    owner = await claimed(impatient)
    await impatient.phases.generate(owner, LONG_S)
    assert await broker.phases.may_generate("w", A_MOMENT_S, is_awake=False)
    monkeypatch.setattr(engine_pauses, "AWAKE_S", LONG_S)
    await outage(impatient, owner, server, tmp_path / "server")  # type: ignore[misc]
    assert await insist(impatient, owner) is None
    assert await impatient.phases.are_engines_awake() is None
    assert not await broker.phases.may_generate("w", LONG_S, is_awake=True)
    assert await insist(impatient, owner) is None  # other workers may be awake
    monkeypatch.setattr(engine_pauses, "AWAKE_S", 0.0)
    assert await insist(impatient, owner) == ("w",)
    await broker.phases.fell_asleep("w")
    assert await insist(impatient, owner) == ()
    assert await impatient.phases.are_engines_awake() is False
