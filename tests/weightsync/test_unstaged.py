"""`staging: none`: members receive into the tensors that they hold, in waves.

A worker says "broken" when a transfer failed over which it had lost its version. `WorkerProcess.events` checks all
other tensors that it holds to the last bit.
"""

import functools
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import DoubleBuffer
from tests.broker.topologies import ask
from tests.weightsync.conftest import CONFIG, Learner, WorkerProcess
from tests.weightsync.interruptions import Place, damaged_bucket
from tests.weightsync.learner_process import publish
from tests.weightsync.processes import ForkedProcess
from tests.weightsync.test_faults import SHORT_S, three_members, until_all_receive, weights_without_c

StartWorker = Callable[..., WorkerProcess]
TOGETHER = 1.0
"""A share with which all members are one wave; with the default each of the few here is one."""


@pytest.fixture(params=["gloo", "ipc"])
def config(request: pytest.FixtureRequest) -> WeightsConfig:
    return replace(CONFIG, bucket_bytes=1024, staging="none", transport=request.param, broadcast_timeout_s=60)


@pytest.fixture
def start_learner(url: str, run_name: str, config: WeightsConfig) -> Iterator[Callable[..., Learner]]:
    started: list[Learner] = []

    def start(resume: bool = False, **changes: object) -> Learner:
        started.append(Learner(url, run_name, replace(config, **changes), resume=resume))
        return started[-1]

    yield start
    for learner in started:
        learner.close()


@pytest.fixture
def start_member(start_worker: StartWorker) -> StartWorker:
    return functools.partial(start_worker, staging="none")


def until_broken(worker: WorkerProcess) -> str:
    while "broken" not in (event := worker.next()):
        pass
    return str(event["broken"])


def test_the_broker_keeps_nothing_that_members_said_of_the_versions_before(
    server: EmbeddedServer, run_name: str, start_learner: Callable[..., Learner], start_member: StartWorker
) -> None:
    learner = start_learner()
    for name in ("one", "two"):
        start_member(name)
    learner.publish()
    counts = []
    for _ in range(3):
        until_all_receive(learner, "one", "two")
        group = learner.blocking.call(learner.blocking.broker.versions.group())
        assert group is not None
        said = ask(server, "KEYS", f"headway:{{{run_name}}}:*:{group.meeting}*")
        counts.append({key.decode(): ask(server, "HLEN", key) for key in said})
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0]) == 3  # of the learner, and of each member


def test_parts_of_the_group_receive_one_after_the_other(
    start_learner: Callable[..., Learner], start_member: StartWorker
) -> None:
    learner = start_learner()
    first, last = start_member("a"), start_member("c")
    slow = start_member("b", interruptions={Place(100, 1): signal.SIGSTOP})
    learner.publish()
    until_all_receive(learner, "a", "b", "c")
    learner.until_held("a", "b", "c")
    before = learner.version
    last.expect(before)
    learner.step = 99
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(learner.publish)
        slow.until_stopped()
        first.expect(learner.version)
        assert last.is_silent()  # the member goes on with its version
        slow.send(signal.SIGCONT)
        assert publishing.result().members == ("a", "b", "c")
    for worker in (slow, last):
        worker.expect(learner.version)
    epoch = learner.epoch()
    until_all_receive(learner, "a", "b", "c")
    assert learner.epoch() == epoch


@pytest.mark.slow
@pytest.mark.parametrize("swaps_at_once", [0.5, TOGETHER])
def test_members_killed_and_stopped_take_at_most_their_wave_with_them(
    start_learner: Callable[..., Learner], start_member: StartWorker, swaps_at_once: float
) -> None:
    learner, place = start_learner(swaps_at_once=swaps_at_once, broadcast_timeout_s=SHORT_S), Place(100, 1)
    healthy, killed, stopped = three_members(learner, start_member, place)

    learner.step = 99
    report = learner.publish()
    assert set(report.members) <= {"healthy"}
    assert swaps_at_once == TOGETHER or report.members  # another wave's fault does not concern it
    killed.until_killed()
    healthy.expect(learner.version)
    until_all_receive(learner, "healthy")

    stopped.send(signal.SIGCONT)  # the member receives the rest, or is broken
    stopped.expect(learner.version)
    until_all_receive(learner, "healthy", "stopped")
    for worker in (healthy, stopped):
        worker.expect(learner.version)


def test_a_learner_killed_within_a_transfer_breaks_only_those_whose_turn_it_was(
    url: str,
    run_name: str,
    config: WeightsConfig,
    start_member: StartWorker,
    start_learner: Callable[..., Learner],
) -> None:
    names = ("one", "two")
    one, two = [start_member(name) for name in names]
    dying = ForkedProcess(publish, url, run_name, config, names, {Place(2, 3): signal.SIGKILL})
    try:
        assert [dying.next(), dying.next()] == [(), names]
        for worker in (one, two):
            worker.expect(WeightVersion(1, 1))
        dying.until_killed()
    finally:
        dying.close()
    until_broken(one)
    successor = start_learner(resume=True)
    successor.until_workers(lambda infos: infos["one"].version is None)
    assert (successor.publish().members, successor.version) == (("two",), WeightVersion(2, 0))
    for worker in (one, two):
        assert worker.expect(WeightVersion(2, 0)) == [[2, 0]]
    until_all_receive(successor, *names)
    for worker in (one, two):
        worker.expect(successor.version)


def test_wrong_bytes_break_and_are_repaired(start_learner: Callable[..., Learner], start_member: StartWorker) -> None:
    learner = start_learner()
    worker = start_member("one")
    learner.publish()
    until_all_receive(learner, "one")

    with damaged_bucket(1):
        learner.until_held("one")
        report = learner.publish()
    assert report.members == ()
    assert "b in bucket 1 arrived damaged" in report.failed
    assert "b in bucket 1 arrived damaged" in until_broken(worker)
    worker.expect(learner.version)
    until_all_receive(learner, "one")


def test_other_tensors_than_before_are_pulled_by_all_waves(
    start_learner: Callable[..., Learner], start_member: StartWorker
) -> None:
    learner = start_learner()
    workers = [start_member("one"), start_member("two")]
    learner.publish()
    until_all_receive(learner, "one", "two")
    learner.until_held("one", "two")
    learner.weights = weights_without_c
    report = learner.publish()
    assert report.members == ()
    assert report.failed.count("other tensors are published than in the version before") == len(workers)
    learner.until_held("one", "two")
    until_all_receive(learner, "one", "two")


def test_a_version_passes_through_two_buckets() -> None:
    window = DoubleBuffer(torch.device("cpu"))
    sizes = (256, 1024, 512, 256)
    places = [(bucket.numel(), bucket.data_ptr()) for bucket in window.buckets(sizes)]
    assert [size for size, _ in places] == list(sizes)
    assert len({address for _, address in places}) == 2
    assert [address for _, address in places] == [bucket.data_ptr() for bucket in window.buckets(sizes)]
