"""Kills, stops and a lack of memory at chosen places of a broadcast: the run goes on, and no worker mixes versions.

`WorkerProcess.events` checks the workers' reports: every tensor is of one published version, to the last bit, and each
version is newer than the one before.
"""

import asyncio
import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.errors import NoRoomError
from headway.broker.schema import WeightVersion
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import BufferSet
from tests.full_disk import no_files_over
from tests.weightsync.conftest import (
    CONFIG,
    ON_GPUS,
    InProcessWorker,
    Learner,
    WorkerProcess,
    pull_then_receive,
    weights,
)
from tests.weightsync.interruptions import Place, damaged_bucket
from tests.weightsync.learner_process import publish
from tests.weightsync.processes import ForkedProcess
from tests.weightsync.worker_process import fingerprint

StartWorker = Callable[..., WorkerProcess]
SHORT_S = 0.7
LONG_S = 8.0
"""A deadline for NCCL, which takes seconds to form a group."""
SMALL = replace(CONFIG, bucket_bytes=1024)
BUCKETS = 3
"""The number of buckets of each version, which are that small; the fingerprints follow them."""


@pytest.fixture(params=["gloo", "ipc", pytest.param("nccl", marks=ON_GPUS)])
def config(request: pytest.FixtureRequest) -> WeightsConfig:
    if request.param == "nccl":
        return replace(SMALL, transport="nccl", staging="device", broadcast_timeout_s=LONG_S)
    return replace(SMALL, transport=request.param)


@pytest.fixture
def start_member(start_worker: StartWorker, config: WeightsConfig) -> StartWorker:
    return functools.partial(start_worker, staging=config.staging)


@pytest.fixture
def hasty_learner(url: str, run_name: str, config: WeightsConfig) -> Iterator[Learner]:
    """Yield a learner with a short deadline, for tests that wait until it passes."""
    started = Learner(url, run_name, hasty(config))
    yield started
    started.close()


@pytest.fixture
def patient_learner(url: str, run_name: str, config: WeightsConfig) -> Iterator[Learner]:
    """Yield a learner whose deadline never passes."""
    started = Learner(url, run_name, replace(config, broadcast_timeout_s=60))
    yield started
    started.close()


def hasty(config: WeightsConfig) -> WeightsConfig:
    return config if config.transport == "nccl" else replace(config, broadcast_timeout_s=SHORT_S)


def weights_without_c(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [named for named in weights(seed) if named[0] != "c"]


def until_all_receive(learner: Learner, *workers: str) -> None:
    """Publish until a version is broadcast to exactly these workers: on a slow machine one may miss a deadline."""
    while True:
        learner.until_held(*workers)
        if learner.publish().members == workers:
            return


def three_members(
    learner: Learner, start_member: StartWorker, place: Place
) -> tuple[WorkerProcess, WorkerProcess, WorkerProcess]:
    """Return a healthy member, one that is killed at the place, and one that is stopped there; all hold a version."""
    healthy = start_member("healthy")
    killed = start_member("killed", interruptions={place: signal.SIGKILL})
    stopped = start_member("stopped", interruptions={place: signal.SIGSTOP})
    learner.publish()
    until_all_receive(learner, "healthy", "killed", "stopped")
    learner.until_held("healthy", "killed", "stopped")
    return healthy, killed, stopped


@pytest.mark.slow
@pytest.mark.parametrize("through", [0, 1, BUCKETS, BUCKETS + 1])
def test_workers_killed_and_stopped_within_a_transfer(
    hasty_learner: Learner, start_member: StartWorker, through: int
) -> None:
    learner, place = hasty_learner, Place(100, through)
    healthy, killed, stopped = three_members(learner, start_member, place)

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


@pytest.mark.parametrize("config", ["gloo"], indirect=True)  # the other transports notice no death
@pytest.mark.parametrize("number", range(3))
def test_a_dead_member_costs_no_deadline_wherever_it_is_in_gloos_tree(
    patient_learner: Learner, start_member: StartWorker, number: int
) -> None:
    learner, names = patient_learner, ("one", "three", "two")  # the first worker sends to the last one
    workers = [start_member(name) for name in names]
    learner.publish()
    until_all_receive(learner, *names)
    learner.until_held(*names)
    workers[number].send(signal.SIGKILL)
    workers[number].until_killed()
    report = learner.publish()
    assert report.failed
    assert report.seconds < 60
    rest = [place for place in range(3) if place != number]
    for place in rest:
        workers[place].expect(learner.version)
    until_all_receive(learner, *(names[place] for place in rest))


@pytest.mark.parametrize("config", ["gloo", "ipc"], indirect=True)  # on a GPU only the newest version is kept for pulls
def test_a_joiner_comes_in_while_a_transfer_stands_still(patient_learner: Learner, start_member: StartWorker) -> None:
    learner = patient_learner
    slow = start_member("slow", interruptions={Place(2, 1): signal.SIGSTOP})
    learner.publish()
    until_all_receive(learner, "slow")
    learner.until_held("slow")
    assert learner.version.step == 1
    before = learner.version
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(learner.publish)
        slow.until_stopped()
        joiner = start_member("joiner")
        joiner.expect(before)  # by pull; no process has the newer one whole
        assert not publishing.done()
        slow.send(signal.SIGCONT)
        assert publishing.result().members == ("slow",)
    for worker in (slow, joiner):
        worker.expect(learner.version)
    until_all_receive(learner, "joiner", "slow")


@pytest.mark.parametrize("through", [1, BUCKETS])
def test_a_learner_killed_within_a_transfer_is_followed_by_another(
    url: str, run_name: str, config: WeightsConfig, start_member: StartWorker, through: int
) -> None:
    names = ("one", "two")
    workers = [start_member(name) for name in names]
    dying = ForkedProcess(publish, url, run_name, config, names, {Place(2, through): signal.SIGKILL})
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
        for worker in workers:  # they kept nothing of 1.2, not even where only its fingerprints lacked
            assert worker.expect(WeightVersion(2, 0)) == [[2, 0]]
        assert successor.publish().members == names
    finally:
        successor.close()


@pytest.mark.parametrize("config", ["gloo", "ipc"], indirect=True)
async def test_fingerprints_that_come_too_late_cost_a_pull(
    url: str, run_name: str, config: WeightsConfig, start_inside: Callable[..., InProcessWorker]
) -> None:
    worker = start_inside("w", replace(CONFIG, staging=config.staging))
    learner = ForkedProcess(publish, url, run_name, hasty(config), ("w",), {Place(2, BUCKETS): signal.SIGSTOP})
    try:
        assert await worker.next() == WeightVersion(1, 0)
        assert await worker.next() == WeightVersion(1, 1)
        waiting = asyncio.create_task(worker.next())
        await worker.until_error("broadcast of 1.2")
        assert not waiting.done()  # all bytes of the version are there
        learner.send(signal.SIGCONT)
        assert await waiting == WeightVersion(1, 2)
        assert [await asyncio.to_thread(learner.next) for _ in range(3)] == [(), ("w",), ()]
    finally:
        await asyncio.to_thread(learner.close)


def test_wrong_bytes_in_one_bucket_are_never_acknowledged(patient_learner: Learner, start_member: StartWorker) -> None:
    learner = patient_learner
    worker = start_member("one")
    learner.publish()
    until_all_receive(learner, "one")

    with damaged_bucket(1):
        learner.until_held("one")
        report = learner.publish()
    assert report.members == ()
    assert "b in bucket 1 arrived damaged" in report.failed
    worker.expect(learner.version)
    until_all_receive(learner, "one")


@pytest.mark.parametrize("config", ["gloo", "ipc"], indirect=True)  # NCCL's receivers wait for their deadline
def test_other_tensors_than_before_are_pulled_once(patient_learner: Learner, start_member: StartWorker) -> None:
    learner = patient_learner
    worker = start_member("one")
    learner.publish()
    until_all_receive(learner, "one")
    worker.expect(learner.version)
    for changed in (weights_without_c, weights):
        learner.until_held("one")
        learner.weights = changed
        report = learner.publish()
        assert report.members == ()
        assert "other tensors are published than in the version before" in report.failed
        until_all_receive(learner, "one")
        while (event := worker.next())["version"] != [1, learner.step]:
            assert event["fingerprint"] == fingerprint(changed(event["version"][1]))


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


@pytest.mark.parametrize("config", ["ipc"], indirect=True)  # gloo's buffers hold a whole bucket of this size
async def test_a_member_without_memory_keeps_nobody_waiting(
    patient_learner: Learner, start_inside: Callable[..., InProcessWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, worker = patient_learner, start_inside("w", SMALL)
    await pull_then_receive(learner, worker)

    def no_room(_: Sequence[int]) -> BufferSet:
        monkeypatch.undo()
        raise NoRoomError("no memory here")

    monkeypatch.setattr(worker.subscriber._landing, "take", no_room)
    report = await asyncio.to_thread(learner.publish)
    assert "no memory here" in report.failed
    assert report.seconds < 60
    assert await worker.next() == learner.version


@pytest.mark.parametrize("follow", ["broadcast", "pull"])
async def test_a_worker_without_memory_keeps_its_version_until_there_is_some(
    learner: Learner, broker: Broker, start_inside: Callable[..., InProcessWorker], follow: str
) -> None:
    worker = start_inside("w", replace(CONFIG, follow=follow))
    await asyncio.to_thread(learner.publish)
    await worker.next()
    served = await broker.versions.announced()
    assert served is not None
    # No machine has that much, so the allocation fails as it would for less on a machine that is full.
    huge = replace(served, version=WeightVersion(1, 1), buckets=(1 << 50, *served.buckets[1:]), deltas=())
    announce = learner.blocking.broker.versions.announce(learner.owner, huge)
    await asyncio.to_thread(learner.blocking.call, announce)
    waiting = asyncio.create_task(worker.next())
    await worker.until_error("no memory on cpu for")
    assert not waiting.done()
    await asyncio.to_thread(learner.publish_as, WeightVersion(1, 2))
    assert await waiting == WeightVersion(1, 2)
