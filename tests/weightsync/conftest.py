"""A learner without training, and workers without engines, around the real broker."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from benchmarks.gpus import gpu_names, on_host
from headway.broker import BlockingBroker, Broker
from headway.broker.client.learner import CheckpointMark
from headway.broker.schema import Owner, RunRules, WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import Delivery
from headway.weightsync.publisher import Publisher, PublishReport
from headway.weightsync.subscriber import Subscriber
from headway.weightsync.transports.http_connections import Content
from headway.weightsync.transports.rendezvous import BlockingStore
from tests.weightsync import worker_process
from tests.weightsync.interruptions import Interruptions
from tests.weightsync.processes import ForkedProcess
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, fingerprint, worker_info

TIMEOUT_S = 2.0
PATIENCE_S = 240.0
# Asks the driver's library: processes that are forked from one that has begun with CUDA cannot use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = WeightsConfig(broadcast_timeout_s=TIMEOUT_S, bucket_bytes=1 << 16, poll_s=0.05)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a seed. Neighbouring seeds differ in 4% of the elements, as an optimizer's steps do."""
    noise = torch.randn(200, 301, generator=torch.Generator().manual_seed(0))
    noise.view(-1)[seed % 50 :: 50] += 1 + seed
    return [
        ("a", noise),
        ("b", noise[:50].bfloat16()),
        ("c", noise[0].half()),
        ("d", torch.arange(seed, seed + 9)),
    ]


def claim(blocking: BlockingBroker, resume: bool = False) -> Owner:
    rules = RunRules(max_lag=2, groups_per_step=1)
    mark = CheckpointMark(1, 1) if resume else CheckpointMark(0, 0)
    return blocking.call(blocking.broker.batches.claim(checkpoint=mark, rules=rules, config=b"", resume=resume)).owner


class Learner:
    """A learner that claims the run and publishes version after version."""

    def __init__(self, url: str, run: str, config: WeightsConfig = CONFIG, resume: bool = False) -> None:
        self.blocking = BlockingBroker(url, run)
        self.owner = claim(self.blocking, resume)
        self.publisher = Publisher(self.blocking, self.owner, config)
        self.step = -1
        self.weights = weights

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.owner.incarnation, self.step)

    def publish(self) -> PublishReport:
        self.step += 1
        return self.publish_as(self.version)

    def publish_as(self, version: WeightVersion) -> PublishReport:
        probe = Probe(token_ids=[1], logprobs=[], tolerance=0.0)
        tensors = iter(self.weights(version.step))
        report = self.publisher.publish(version, self.publisher.gather(tensors), probe)
        assert next(tensors, None) is None  # other ranks gather them too, also when a broadcast fails
        return report

    def epoch(self) -> int:
        group = self.blocking.call(self.blocking.broker.versions.group())
        return group.epoch if group else 0

    def close(self) -> None:
        self.publisher.close()
        self.blocking.close()

    def until_workers(self, accept: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the heartbeats satisfy `accept`."""
        done = threading.Event()
        for _ in range(int(PATIENCE_S / 0.05)):
            infos = self.blocking.call(self.blocking.broker.status.workers())
            if accept({info.worker: info for info in infos}):
                return
            done.wait(0.05)
        raise AssertionError(f"heartbeats stayed {infos}")

    def until_held(self, *workers: str) -> None:
        """Wait until all of `workers` report that they hold the newest version."""
        self.until_workers(lambda infos: all(w in infos and infos[w].version == self.version for w in workers))


def served_bytes(learner: Learner) -> list[int]:
    """Return a list that gets the size of each answer of this learner from now on."""
    find, sizes = learner.publisher._pull_server.find, list[int]()

    def noted(path: str) -> Content | None:
        found = find(path)
        sizes.append(0 if found is None else len(found.data))
        return found

    learner.publisher._pull_server.find = noted  # type: ignore[method-assign]
    return sizes


def gpu_of(number: int) -> dict[str, str]:
    """Return the environment of a test's process of this number: its GPU, or nothing on a machine without GPUs.

    Where there are more processes than GPUs, those that share one are as on different hosts, the others as on one.
    """
    names = gpu_names(torch.cuda.device_count())
    if not names:
        return {}
    shared, gpu = divmod(number, len(names))
    return {"CUDA_VISIBLE_DEVICES": names[gpu], **(on_host(f"host {shared}") if shared else {})}


class WorkerProcess(ForkedProcess):
    """A subscriber in a process of its own."""

    def __init__(
        self,
        url: str,
        run: str,
        name: str,
        config: WeightsConfig,
        interruptions: Interruptions,
        environment: dict[str, str],
    ) -> None:
        super().__init__(worker_process.follow_run, url, run, name, config, interruptions, environment)

    def expect(self, version: WeightVersion) -> list[list[int]]:
        """Read up to `version`, whose tensors must be right to the last bit, and return all versions that were read."""
        return [event["version"] for event in self.events(version)]

    def events(self, version: WeightVersion) -> list[dict[str, Any]]:
        """Read up to `version` as `expect` does, and return all of the worker's reports."""
        events: list[dict[str, Any]] = []
        while True:
            event = self.next()
            if "broken" in event:
                continue
            events.append(event)
            assert event["fingerprint"] == fingerprint(weights(event["version"][1]))
            if event["version"] == [version.incarnation, version.step]:
                assert events == sorted(events, key=lambda other: other["version"])
                return events


class InProcessWorker:
    """A subscriber on the test's own event loop, with the heartbeat of a worker."""

    def __init__(self, broker: Broker, name: str, config: WeightsConfig = CONFIG, model: Path | None = None) -> None:
        self.name = name
        self._broker = broker
        self.subscriber = Subscriber(broker, name, config, model=model)
        self.version: WeightVersion | None = None

    async def next(self) -> WeightVersion:
        """Wait for the next version, check it and take it over."""
        async with asyncio.timeout(PATIENCE_S):
            delivery = await self.subscriber.wait_for_version(self.version)
        assert isinstance(delivery, Delivery)
        version = delivery.manifest.version
        assert fingerprint(delivery.tensors) == fingerprint(weights(version.step))
        self.version = version
        await self.beat()
        return version

    async def until_error(self, text: str) -> None:
        """Wait until the subscriber complains of `text`."""
        for _ in range(int(PATIENCE_S / 0.02)):
            if text in self.subscriber.last_error:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"last_error stayed {self.subscriber.last_error!r}")

    async def beat(self) -> None:
        info = worker_info(self.name, self.version, self.subscriber.epoch, self.subscriber.joins_groups)
        await self._broker.status.heartbeat(info, HEARTBEAT_TTL_S)


async def pull_then_receive(learner: Learner, worker: InProcessWorker) -> None:
    """Publish two versions: a worker that holds the first one is in the group of the second one."""
    for _ in range(2):
        await asyncio.to_thread(learner.publish)
        await worker.next()


async def announced(broker: Broker) -> WeightManifest:
    manifest = await broker.versions.announced()
    assert manifest is not None
    return manifest


@pytest.fixture
def blocking_store(blocking: BlockingBroker) -> BlockingStore:
    """Return a store for both ends of a group, in threads of the test: the learner's, and that of the living worker
    `w`."""
    claim(blocking)
    blocking.call(blocking.broker.status.heartbeat(worker_info("w", None, 0), HEARTBEAT_TTL_S))
    return BlockingStore(blocking.call, blocking.broker.rendezvous)


@pytest.fixture
def learner(url: str, run_name: str) -> Iterator[Learner]:
    started = Learner(url, run_name)
    yield started
    started.close()


@pytest.fixture
def start_worker(url: str, run_name: str) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(
        name: str,
        follow: str = "broadcast",
        interruptions: Interruptions | None = None,
        archive: str = "none",
        staging: str = "host",
        **environment: str,
    ) -> WorkerProcess:
        config = replace(CONFIG, follow=follow, archive=archive, staging=staging)
        environment = {**gpu_of(len(started) + 1), **environment}  # the learner is the first
        started.append(WorkerProcess(url, run_name, name, config, interruptions or {}, environment))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
async def start_inside(broker: Broker) -> AsyncIterator[Callable[..., InProcessWorker]]:
    started: list[InProcessWorker] = []

    def start(name: str, config: WeightsConfig = CONFIG, model: Path | None = None) -> InProcessWorker:
        started.append(InProcessWorker(broker, name, config, model))
        return started[-1]

    yield start
    for worker in started:
        await worker.subscriber.close()
