"""Workers of one pool swap weights in turns: real brokers and engines, and swaps slow enough to overlap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.client.broker import Broker
from headway.broker.schema import WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.weight_updates import engine_turns
from headway.rollout_workers.worker import Worker
from headway.weightsync.config import WeightsConfig
from tests.broker.test_codec import WORKER

from .loop import Deliveries, Learner, delivery, make_engine, make_worker, running, until
from .models import make_model

SWAP_S = 0.1
"""The duration of a swap, in which workers that did not wait for each other would meet."""


@dataclass
class Swapping:
    """Notes the engines that are in a swap, and the largest number that were at once."""

    now: set[str] = field(default_factory=set)
    most: int = 0
    expected: int = 1
    """Each swap waits until so many run at once."""
    done: list[tuple[str, WeightVersion]] = field(default_factory=list)

    def watch(self, engine: Any, name: str) -> Any:
        """Make the engine's swaps slow, and note all after the first, which interrupts nothing."""
        swap, swaps = engine.swap_weights, 0

        async def noted(version: WeightVersion, tensors: Any, **how: Any) -> None:
            nonlocal swaps
            swaps += 1
            if swaps > 1:
                self.now.add(name)
                self.most = max(self.most, len(self.now))
                await asyncio.sleep(SWAP_S)
                await until(lambda: self.most >= self.expected)
            await swap(version, tensors, **how)
            self.now.discard(name)
            self.done.append((name, version))

        engine.swap_weights = noted
        return engine


class Pool:
    """Workers in this process, each with a connection of its own."""

    def __init__(self, server: EmbeddedServer, directory: Path, stack: AsyncExitStack) -> None:
        self.swapping = Swapping()
        self.deliveries: dict[str, Deliveries] = {}
        self.workers: dict[str, Worker] = {}
        self._server = server
        self._directory = directory
        self._stack = stack

    async def open(self, timeout_s: float = 20) -> Broker:
        broker = Broker(self._server.url, "run", timeout_s=timeout_s)
        self._stack.push_async_callback(broker.close)
        return broker

    async def join(self, learner: Learner, *names: str, timeout_s: float = 20, **changes: Any) -> None:
        """Have these workers begin; return once the broker knows that they hold weights."""
        for name in names:
            engine = self.swapping.watch(make_engine(self._directory / name), name)
            self.deliveries[name] = Deliveries()
            worker = make_worker(
                await self.open(timeout_s), engine, self.deliveries[name], name=name, heartbeat_s=0.2, **changes
            )
            self.workers[name] = worker
            await self._stack.enter_async_context(running(worker))
        await learner.publish(learner.announced.step + 1 if learner.announced else 0, *self.of(*names))
        async with asyncio.timeout(240):
            while not {info.worker for info in await learner.broker.status.workers() if info.version} >= set(names):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def of(self, *names: str) -> list[Deliveries]:
        return [self.deliveries[name] for name in names or self.deliveries]

    async def hold(self, version: WeightVersion, *names: str) -> None:
        """Wait until these workers, or all, hold the version."""
        await until(lambda: all(self.workers[n].info().version == version for n in names or self.workers))


@pytest.fixture
async def pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        yield Pool(server, tmp_path, stack)


@pytest.mark.parametrize(("workers", "share", "at_once"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 1), (3, 1.0, 3)])
async def test_never_all_swap_at_once(pool: Pool, workers: int, share: float, at_once: int) -> None:
    learner = await Learner.start(await pool.open(), groups=8, max_lag=8)
    await pool.join(learner, *(f"w{number}" for number in range(workers)), weights=WeightsConfig(swaps_at_once=share))
    pool.swapping.expected = at_once
    await learner.publish(1, *pool.of())
    await pool.hold(learner.version(1))
    assert pool.swapping.most == at_once
    assert await learner.broker._connection.execute("EXISTS", learner.broker._connection.keys.hidden("turns")) == 0


async def test_a_pool_that_grows_and_shrinks(pool: Pool) -> None:
    learner = await Learner.start(await pool.open(), groups=8, max_lag=8)
    await pool.join(learner, "w0", "w1")
    await pool.join(learner, "w2", "w3")  # their first weights interrupt nothing, and wait for no turn
    pool.swapping.expected = 2
    await learner.publish(2, *pool.of())
    await pool.hold(learner.version(2))
    assert pool.swapping.most == 2
    for name in ("w2", "w3"):
        pool.workers.pop(name).request_drain()
        del pool.deliveries[name]
    async with asyncio.timeout(240):
        while len(await learner.broker.status.workers()) > 2:  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.02)
    pool.swapping.most, pool.swapping.expected = 0, 1
    await learner.publish(3, *pool.of())
    await pool.hold(learner.version(3))
    assert pool.swapping.most == 1


async def serving(learner: Learner, name: str) -> str:
    """Report a worker once, and return its token."""
    await learner.broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=name), 100)
    return f"{name}:1"


async def test_a_holder_that_died_is_waited_for_no_longer_than_its_deadline(pool: Pool) -> None:
    learner = await Learner.start(await pool.open(), groups=8, max_lag=8)
    await pool.join(learner, "w0", "w1")
    dead = await serving(learner, "dead")
    assert await learner.broker.swap_turns.take(dead, 0.5, 1)
    await learner.publish(1, *pool.of("w0"))
    await until(lambda: pool.deliveries["w0"].queue.empty())
    await learner.publish(2, *pool.of("w0"))  # the version arrives while the worker waits
    await pool.hold(learner.version(2), "w0")
    assert not await learner.broker.swap_turns.renew(dead, 1)
    assert [version.step for name, version in pool.swapping.done if name == "w0"] == [0, 2]


async def test_a_holder_that_lives_and_hangs_is_not_waited_for_for_ever(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_turns, "LONGEST_TURN_WAIT_S", 0.2)
    learner = await Learner.start(await pool.open(), groups=8, max_lag=8)
    await pool.join(learner, "w0", "w1")
    hung = await serving(learner, "hung")
    assert await learner.broker.swap_turns.take(hung, 0.5, 1000)
    await learner.publish(1, *pool.of())
    await pool.hold(learner.version(1))
    assert "no turn within" in caplog.text
    assert await learner.broker.swap_turns.renew(hung, 1000)


async def test_a_broker_that_is_away_stops_no_swap(pool: Pool, server: EmbeddedServer) -> None:
    learner = await Learner.start(await pool.open(), groups=8, max_lag=8)
    await pool.join(learner, "w0", "w1", timeout_s=0.5)
    sent = delivery(learner.version(1), make_model("dense", 1))
    server.stop()
    for deliveries in pool.of():
        deliveries.queue.put_nowait(sent)
    await pool.hold(learner.version(1))
