"""Kills, stops and want of memory at chosen places of a broadcast: the run goes on, and no worker mixes versions.

What a worker tells of is checked by `WorkerProcess.events`: every tensor is of one published version, to the last bit,
and each version is newer than the one before.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from broker import Broker
from broker.schema import WeightVersion
from tests.full_disk import no_files_over
from tests.weightsync.conftest import CONFIG, InProcessWorker, Learner, WorkerProcess
from tests.weightsync.interruptions import Place
from tests.weightsync.learner_process import publish
from tests.weightsync.processes import ForkedProcess
from weightsync.config import WeightsConfig

StartWorker = Callable[..., WorkerProcess]
SHORT_S = 0.7
SMALL = replace(CONFIG, bucket_bytes=1024)
BUCKETS = 3
"""Of each version, so small are they."""


@pytest.fixture(params=["gloo", "ipc"])
def config(request: pytest.FixtureRequest) -> WeightsConfig:
    return replace(SMALL, transport=request.param)


@pytest.fixture
def hasty_learner(url: str, run_name: str, config: WeightsConfig) -> Iterator[Learner]:
    """Its deadline is that of tests that wait for it."""
    started = Learner(url, run_name, replace(config, broadcast_timeout_s=SHORT_S))
    yield started
    started.close()


@pytest.fixture
def patient_learner(url: str, run_name: str, config: WeightsConfig) -> Iterator[Learner]:
    """Its deadline is never met."""
    started = Learner(url, run_name, replace(config, broadcast_timeout_s=60))
    yield started
    started.close()


def until_all_receive(learner: Learner, *workers: str) -> None:
    """Publish until a version is broadcast to exactly these: on a slow machine one may miss a deadline."""
    while True:
        learner.until_held(*workers)
        if learner.publish().members == workers:
            return


@pytest.mark.parametrize("through", [0, 1, BUCKETS])
def test_workers_killed_and_stopped_within_a_transfer(
    hasty_learner: Learner, start_worker: StartWorker, through: int
) -> None:
    learner, place = hasty_learner, Place(100, through)
    healthy = start_worker("healthy")
    killed = start_worker("killed", interruptions={place: signal.SIGKILL})
    stopped = start_worker("stopped", interruptions={place: signal.SIGSTOP})
    learner.publish()
    until_all_receive(learner, "healthy", "killed", "stopped")
    learner.until_held("healthy", "killed", "stopped")

    learner.step = 99
    report = learner.publish()
    assert not {"killed", "stopped"} & set(report.members)
    assert "killed" in report.failed
    assert "stopped" in report.failed
    killed.until_killed()
    healthy.expect(learner.version)
    until_all_receive(learner, "healthy")  # the next epoch works

    stopped.send(signal.SIGCONT)
    stopped.expect(learner.version)
    until_all_receive(learner, "healthy", "stopped")
    for worker in (healthy, stopped):
        worker.expect(learner.version)


def test_a_joiner_comes_in_while_a_transfer_stands_still(patient_learner: Learner, start_worker: StartWorker) -> None:
    learner = patient_learner
    slow = start_worker("slow", interruptions={Place(2, 1): signal.SIGSTOP})
    learner.publish()
    until_all_receive(learner, "slow")
    learner.until_held("slow")
    assert learner.version.step == 1
    before = learner.version
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(learner.publish)
        slow.until_stopped()
        joiner = start_worker("joiner")
        joiner.expect(before)  # by pull; the newer one is not whole anywhere
        assert not publishing.done()
        slow.send(signal.SIGCONT)
        assert publishing.result().members == ("slow",)
    for worker in (slow, joiner):
        worker.expect(learner.version)
    until_all_receive(learner, "joiner", "slow")


def test_a_learner_killed_within_a_transfer_is_followed_by_another(
    url: str, run_name: str, config: WeightsConfig, start_worker: StartWorker
) -> None:
    names = ("one", "two")
    workers = [start_worker(name) for name in names]
    dying = ForkedProcess(publish, url, run_name, config, names, {Place(2, 1): signal.SIGKILL})
    try:
        assert [dying.next(), dying.next()] == [(), names]
        for worker in workers:
            worker.expect(WeightVersion(1, 1))
        dying.until_killed()
    finally:
        dying.close()
    successor = Learner(url, run_name, config, resume=True)
    try:
        assert (successor.publish().members, successor.version) == (names, WeightVersion(2, 0))
        for worker in workers:  # of the half that had come of 1.2 they kept nothing
            assert worker.expect(WeightVersion(2, 0)) == [[2, 0]]
        assert successor.publish().members == names
    finally:
        successor.close()


def test_no_room_for_the_senders_buffer_costs_a_pull_each_until_there_is(
    url: str, run_name: str, start_worker: StartWorker
) -> None:
    learner = Learner(url, run_name, replace(SMALL, transport="ipc", broadcast_timeout_s=60))
    try:
        worker = start_worker("one")
        learner.publish()
        learner.until_held("one")
        with no_files_over(10_000):
            report = learner.publish()
            assert report.members == ()
            assert "no room for 240896 bytes of weights" in report.failed
            worker.expect(learner.version)
        until_all_receive(learner, "one")
        worker.expect(learner.version)
    finally:
        learner.close()


@pytest.mark.parametrize("follow", ["broadcast", "pull"])
async def test_a_worker_without_memory_keeps_its_version_until_there_is_some(
    learner: Learner, broker: Broker, start_inside: Callable[..., InProcessWorker], follow: str
) -> None:
    worker = start_inside("w", replace(CONFIG, follow=follow))
    await asyncio.to_thread(learner.publish)
    await worker.next()
    served = await broker.versions.announced()
    assert served is not None
    # Nobody has that much, so the allocation fails as it would for less on a machine that is full.
    huge = replace(served, version=WeightVersion(1, 1), buckets=(1 << 50, *served.buckets[1:]), deltas=())
    announce = learner.blocking.broker.versions.announce(learner.owner, huge)
    await asyncio.to_thread(learner.blocking.call, announce)
    waiting = asyncio.create_task(worker.next())
    await worker.until_error("no memory on cpu for")
    assert not waiting.done()
    await asyncio.to_thread(learner.publish_as, WeightVersion(1, 2))
    assert await waiting == WeightVersion(1, 2)
