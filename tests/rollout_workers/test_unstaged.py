"""`staging: none` with real engines: arriving tensors overwrite the engine's own, and no token is of a mixture."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.broker.client.broker import BlockingBroker, Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import Trajectory, WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.engines.base import Parts
from headway.rollout_workers.worker import Worker
from headway.weightsync import publisher as publisher_module
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher, PublishReport, _on_the_wire
from headway.weightsync.subscriber import Subscriber
from headway.weightsync.tensors.staging import Gathering

from .loop import LONG, Learner, delivery, make_engine, make_worker, running, until
from .models import make_model
from .test_worker_weights import check_logprobs

CONFIG = WeightsConfig(staging="none", bucket_bytes=1 << 15, broadcast_timeout_s=20)


class Publishing:
    """A learner moved by hand whose versions are really sent."""

    def __init__(self, blocking: BlockingBroker, learner: Learner) -> None:
        self.blocking = blocking
        self.learner = learner
        self.publisher = Publisher(blocking, learner.owner, CONFIG)
        self.step = -1

    @property
    def version(self) -> WeightVersion:
        return self.learner.version(self.step)

    async def publish(self) -> PublishReport:
        self.step += 1
        model = self.learner.models[self.version] = make_model("dense", self.step)
        sent = delivery(self.version, model)
        gathering = self.publisher.gather(sent.tensors)
        return await asyncio.to_thread(self.publisher.publish, self.version, gathering, sent.manifest.probe)

    async def publish_to(self, *members: str) -> None:
        """Publish versions until one is broadcast to exactly these workers."""
        async with asyncio.timeout(240):
            while True:
                if (await self.publish()).members == members:
                    return
                await asyncio.sleep(0.2)  # heartbeats report it meanwhile

    async def take_until(self, is_it: Callable[[Trajectory], bool]) -> list[Trajectory]:
        """Take step after step, until one of the trajectories is the one that the test looks for."""
        taken: list[Trajectory] = []
        async with asyncio.timeout(240):
            for step in itertools.count(self.step):
                for group in await asyncio.to_thread(self.blocking.call, self.learner.take(step)):
                    taken += group.trajectories
                if any(map(is_it, taken)):
                    break
        return taken

    async def close(self) -> None:
        await asyncio.to_thread(self.publisher.close)
        await asyncio.to_thread(self.blocking.close)


@pytest.fixture
async def learner(server: EmbeddedServer) -> AsyncIterator[Publishing]:
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    moved = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=200, max_lag=100))
    publishing = await asyncio.to_thread(Publishing, blocking, moved)
    yield publishing
    await publishing.close()


def member(broker: Broker, directory: Path, name: str = "worker-1") -> tuple[Worker, Any, Subscriber]:
    engine, subscriber = make_engine(directory / name, max_model_len=256), Subscriber(broker, name, CONFIG)
    options: dict[str, Any] = {"name": name, "max_new_tokens": LONG, "heartbeat_s": 0.3, "weights": CONFIG}
    return make_worker(broker, engine, subscriber, **options), engine, subscriber


def is_held(worker: Worker, version: WeightVersion) -> bool:
    return worker.info().version == version


async def test_engines_receive_one_after_the_other_what_they_sample_with(
    learner: Publishing, brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    paused: set[str] = set()
    together: list[set[str]] = []
    workers = []

    def watch(name: str, engine: Any) -> None:
        swap = engine.swap_in_parts

        async def watched(version: WeightVersion, parts: Parts, **how: Any) -> None:
            paused.add(name)
            together.append(set(paused))
            await swap(version, parts, **how)
            paused.discard(name)

        engine.swap_in_parts = watched

    async with AsyncExitStack() as stack:
        for name in ("worker-1", "worker-2"):
            worker, engine, _ = member(brokers[1], tmp_path, name)
            watch(name, engine)
            await stack.enter_async_context(running(worker))
            workers.append(worker)
        await learner.publish()
        await until(lambda: all(worker.info().active > 0 for worker in workers))
        await learner.publish_to("worker-1", "worker-2")
        await until(lambda: all(is_held(worker, learner.version) for worker in workers))
        trajectories = await learner.take_until(lambda trajectory: len(trajectory.spans) > 1)
    assert {*map(tuple, together)} == {("worker-1",), ("worker-2",)}
    check_logprobs(learner.learner, trajectories)


async def test_an_engine_that_was_left_in_the_middle_samples_nothing_until_it_is_repaired(
    learner: Publishing, brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, subscriber = member(brokers[1], tmp_path)
    may_pull = threading.Event()
    pull = subscriber._background_puller._puller.pull

    def pull_when_allowed(*arguments: Any) -> Any:
        may_pull.wait(240)
        return pull(*arguments)

    def cut_off(version: WeightVersion, gathering: Gathering) -> Iterator[torch.Tensor]:
        for index, bucket in enumerate(_on_the_wire(version, gathering)):
            if index == 3:
                raise WeightSyncError("cut off")
            yield bucket

    async with running(worker):
        await learner.publish()
        await learner.publish_to("worker-1")
        before = learner.version
        await until(lambda: is_held(worker, before) and worker.info().active > 0)
        monkeypatch.setattr(subscriber._background_puller._puller, "pull", pull_when_allowed)
        with monkeypatch.context() as patched:
            patched.setattr(publisher_module, "_on_the_wire", cut_off)
            # On a busy machine its heartbeat may have lapsed, and the first versions are sent to no worker.
            while "cut off" not in (await learner.publish()).failed:
                pass
        await until(lambda: worker.info().state == "paused")
        info = worker.info()
        assert (info.version, info.wants_broadcast) == (None, True)
        assert info.active > 0
        assert info.last_error
        await asyncio.sleep(0.3)
        assert worker.info().generated_tokens == info.generated_tokens
        assert worker.info().paused_s > info.paused_s > 0
        may_pull.set()
        await until(lambda: is_held(worker, learner.version))
        paused_s = worker.info().paused_s
        repaired = learner.version
        trajectories = await learner.take_until(
            lambda trajectory: [before, repaired] == [span.version for span in trajectory.spans[-2:]]
        )
        assert worker.info().last_error == ""
        assert worker.info().state in {"generating", "idle"}
        assert worker.info().paused_s == paused_s, "it is over"
        await learner.publish_to("worker-1")
    check_logprobs(learner.learner, trajectories)
