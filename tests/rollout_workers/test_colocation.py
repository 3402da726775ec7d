"""A worker whose engine has the device in turns. Broker and engine are real; the test moves the learner's side."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.broker.client.broker import Broker, Outages
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.weight_updates import engine_turns as device_lock
from headway.rollout_workers.weight_updates.engine_turns import keep_awake, wait_for_device
from headway.rollout_workers.worker import Worker

from .loop import Deliveries, Learner, make_engine, make_worker, running, until

LONG_S = 1000.0
TOKENS = 200


class Asked(Deliveries):
    """Notes the version that the engine is said to hold at each wait for a newer one."""

    def __init__(self) -> None:
        super().__init__()
        self.current: list[Any] = []

    async def wait_for_version(self, current: Any) -> Any:
        self.current.append(current)
        return await super().wait_for_version(current)


def watched(engine: Any) -> Any:
    """Count the engine's sleeps, and assert that no request reaches it meanwhile.

    The engine itself asserts that nothing runs when it falls asleep.
    """
    engine.slept, engine.sleeps = 0, False
    sleep, wake, generate, swap = engine.sleep, engine.wake, engine.generate, engine.swap_weights

    async def noted_sleep() -> None:
        await sleep()
        engine.slept, engine.sleeps = engine.slept + 1, True

    async def noted_wake() -> None:
        engine.sleeps = False
        await wake()

    async def noted_swap(*arguments: Any, **options: Any) -> None:
        assert not engine.sleeps
        await swap(*arguments, **options)

    def noted_generate(request: Any) -> Any:
        assert not engine.sleeps
        return generate(request)

    engine.sleep, engine.wake, engine.generate, engine.swap_weights = (
        noted_sleep,
        noted_wake,
        noted_generate,
        noted_swap,
    )
    return engine


@asynccontextmanager
async def at_work(broker: Broker, engine: Any, deliveries: Deliveries, **options: Any) -> AsyncIterator[Worker]:
    assert await wait_for_device(broker.phases, "worker-1", Outages(broker.url), is_never_over)
    worker = make_worker(broker, engine, deliveries, is_colocated=True, segment_tokens=0, **options)
    async with running(worker) as task:
        yield worker
    assert task.result() == "drained"


async def is_never_over() -> bool:
    return False


async def all_asleep(learner: Learner) -> None:
    async with asyncio.timeout(240):
        while await learner.broker.phases.train(learner.owner):  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)


async def test_it_sleeps_while_the_learner_trains_and_its_samples_go_on_afterwards(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Asked(), watched(make_engine(tmp_path, capacity=1))  # for a busy machine: never all at once
    await learner.broker.phases.generate(learner.owner, LONG_S)
    await learner.publish(0, deliveries)
    async with at_work(brokers[1], engine, deliveries, max_new_tokens=TOKENS) as worker:
        await until(lambda: worker.info().generated_tokens > 0)
        await all_asleep(learner)
        assert (engine.slept, engine.sleeps) == (1, True)
        info = worker.info()
        assert (info.state, info.active, info.version) == ("asleep", 0, learner.version(0))
        assert info.wants_broadcast
        await learner.publish(1, deliveries)  # the version comes while the engine sleeps, and waits
        await until(deliveries.queue.empty)
        status = await learner.broker.status.snapshot()
        assert status.queues.leased == 0
        assert worker.info().generated_tokens == info.generated_tokens
        await learner.broker.phases.generate(learner.owner, LONG_S)
        groups = await learner.take(1)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert any(len(trajectory.spans) == 2 for trajectory in trajectories)
    for trajectory in trajectories:
        assert {span.version for span in trajectory.spans} <= {learner.version(0), learner.version(1)}
    assert worker.resumed_tokens > 0
    assert worker.info().swaps == 2
    assert deliveries.current == [None, learner.version(0), learner.version(1)]


async def test_an_engine_that_wakes_to_no_newer_weights_is_given_its_own_again(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Asked(), watched(make_engine(tmp_path, capacity=1))
    await learner.broker.phases.generate(learner.owner, LONG_S)
    await learner.publish(0, deliveries)
    async with at_work(brokers[1], engine, deliveries, max_new_tokens=TOKENS) as worker:
        await until(lambda: worker.info().generated_tokens > 0)
        await all_asleep(learner)
        await learner.broker.phases.generate(learner.owner, LONG_S)
        await until(lambda: deliveries.current == [None, learner.version(0), None])
        generated = worker.info().generated_tokens
        await learner.publish(0, deliveries)
        groups = await learner.take(0)
    assert len(groups) == 2
    assert worker.info().generated_tokens > generated
    assert worker.info().swaps == 2


async def test_without_a_learner_it_falls_asleep_and_leaves_when_it_is_told(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), watched(make_engine(tmp_path))
    await learner.broker.phases.generate(learner.owner, 0.3)
    async with at_work(brokers[1], engine, deliveries) as worker:
        await until(lambda: engine.sleeps)
        async with asyncio.timeout(240):  # the worker reports it only then
            while await learner.broker.phases.are_engines_awake():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        assert worker.info().state == "starting"
    assert await learner.broker.phases.train(learner.owner) == ()


async def test_a_worker_that_leaves_has_left_the_device(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), watched(make_engine(tmp_path))
    await learner.broker.phases.generate(learner.owner, LONG_S)
    await learner.publish(0, deliveries)
    async with at_work(brokers[1], engine, deliveries, heartbeat_s=100.0) as worker:
        await until(lambda: worker.info().generated_tokens > 0)
    assert not engine.slept
    assert await learner.broker.phases.train(learner.owner) == ()


async def test_a_worker_that_leaves_counts_as_asleep_though_its_last_question_is_under_way(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine, phases = Deliveries(), watched(make_engine(tmp_path)), brokers[1].phases
    await learner.broker.phases.generate(learner.owner, LONG_S)
    await learner.publish(0, deliveries)
    may_generate, questions = phases.may_generate, set[asyncio.Task[bool]]()

    async def late(*arguments: Any, **options: Any) -> bool:
        """Reach the server although the asker was cancelled, as a request does that was written before."""

        async def arrive() -> bool:
            await asyncio.sleep(0.3)
            return await may_generate(*arguments, **options)

        question = asyncio.create_task(arrive())
        questions.add(question)
        return await asyncio.shield(question)

    async with at_work(brokers[1], engine, deliveries, heartbeat_s=100.0) as worker:
        monkeypatch.setattr(phases, "may_generate", late)
        await until(lambda: bool(questions) and worker.info().generated_tokens > 0)
    await asyncio.gather(*questions)
    assert await learner.broker.phases.train(learner.owner) == ()


async def test_samples_whose_leases_come_late_are_handed_back(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    """The phase ends while the broker is answering."""
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), watched(make_engine(tmp_path))
    await learner.broker.phases.generate(learner.owner, LONG_S)
    await learner.publish(0, deliveries)
    leases, asked, answer = brokers[1].leases, asyncio.Event(), asyncio.Event()
    lease = leases.lease

    async def slow(*arguments: Any) -> Any:
        reply = await lease(*arguments)
        asked.set()
        await answer.wait()
        return reply

    leases.lease = slow  # type: ignore[assignment, method-assign]
    async with at_work(brokers[1], engine, deliveries, max_new_tokens=TOKENS):
        await asked.wait()
        assert await learner.broker.phases.train(learner.owner) == ("worker-1",)
        await asyncio.sleep(0.1)
        assert not engine.sleeps
        answer.set()
        await all_asleep(learner)
        assert engine.sleeps
        assert (await learner.broker.status.snapshot()).queues.leased == 0


async def test_an_engine_is_opened_only_while_engines_may_generate(brokers: tuple[Broker, Broker]) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    phases, outages = brokers[1].phases, Outages(brokers[1].url)

    async def is_over() -> bool:
        return await brokers[1].status.state() == "finished"

    opening = asyncio.create_task(wait_for_device(phases, "w", outages, is_over))
    await asyncio.sleep(0.1)
    assert not opening.done()
    assert await learner.broker.phases.train(learner.owner) == ()
    await learner.broker.phases.generate(learner.owner, LONG_S)
    assert await opening
    assert await learner.broker.phases.train(learner.owner) == ("w",)
    opening = asyncio.create_task(wait_for_device(phases, "w", outages, is_over))  # the worker was started again
    await all_asleep(learner)
    await learner.broker.status.set_state(learner.owner, "finished")
    assert not await opening


async def test_a_worker_counts_as_awake_while_its_engine_starts(
    brokers: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "OPENING_S", 0.5)
    monkeypatch.setattr(device_lock, "SAY_S", 0.1)
    learner = await Learner.start(brokers[0], groups=2)
    await learner.broker.phases.generate(learner.owner, LONG_S)
    assert await brokers[1].phases.may_generate("w", 0.5, is_awake=False)
    with keep_awake(brokers[1], "w"):
        await asyncio.sleep(1.5)
        assert await learner.broker.phases.train(learner.owner) == ("w",)
    await all_asleep(learner)


async def test_an_engine_starts_while_the_broker_is_away(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "SAY_S", 0.1)
    await Learner.start(brokers[0], groups=2)
    server.stop()
    with keep_awake(brokers[1], "w"):
        server.start()
        connection, names = brokers[0]._connection, list[bytes]()
        async with asyncio.timeout(240):
            while [name.partition(b" ")[0] for name in names] != [b"w"]:  # the worker reports it once it can
                names = await connection.execute("ZRANGE", connection.keys.hidden("awake"), 0, -1)
