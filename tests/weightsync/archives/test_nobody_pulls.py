"""An archive ends with its last reader: nothing of it stays in the archive or in the learner's memory."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Set
from pathlib import Path

import pytest

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Archived, DeltaSpec
from headway.weightsync.archives.archiver import Archiver
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.deltas import Delta
from headway.weightsync.tensors.staging import StagedWeights, stage
from tests.broker.scenario import hidden
from tests.weightsync.archives.follower import Follower, archived, files, in_broker, in_directory, publish
from tests.weightsync.conftest import CONFIG, TIMEOUT_S, Learner, announced, weights
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, worker_info

FIRST, SECOND = WeightVersion(1, 0), WeightVersion(1, 1)
DELTA = Delta(DeltaSpec(FIRST, SECOND, 1, "0" * 32), b"x")


class Shelf:
    """An archive in a dictionary."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tidied = 0
        self.before_put: Callable[[Deadline], None] = lambda _: None

    def reserve(self, nbytes: int) -> None:
        """There is always room."""

    def put(self, name: str, data: memoryview, deadline: Deadline) -> None:
        self.blobs[name] = bytes(data)
        self.before_put(deadline)

    def keep_only(self, names: Set[str]) -> set[str]:
        self.tidied += 1
        self.blobs = {name: data for name, data in self.blobs.items() if name in names}
        return set(self.blobs)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def archiver(shelf: Shelf) -> Archiver:
    return Archiver(shelf, 4, TIMEOUT_S)


def staged() -> StagedWeights:
    return stage(weights(0), CONFIG.bucket_bytes)


def until_anchor_ends(archiver: Archiver) -> None:
    assert archiver._writing is not None
    archiver._writing.join()


@in_directory
async def test_files_go_with_the_last_reader(learner: Learner, broker: Broker, folder: Path) -> None:
    await publish(learner, 3)
    assert files(folder)
    await broker.status.leave("far")
    await publish(learner)
    assert not files(folder)
    assert (await announced(broker)).archived is None


@in_broker
async def test_bytes_in_the_broker_go_with_the_last_reader(learner: Learner, broker: Broker) -> None:
    async def counted() -> int:
        return int(await broker._connection.execute("HGET", await hidden(broker, "meta"), "archive_bytes"))

    await publish(learner, 3)
    assert await counted() > 0
    await broker.status.leave("far")
    await publish(learner)
    assert await counted() == 0
    assert await broker._connection.scan(broker._connection.keys("archive:*")) == []


async def test_the_next_reader_finds_an_archive_again(
    learner: Learner, config: WeightsConfig, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(learner, 3)
    await broker.status.leave("far")
    await publish(learner, 2)
    await broker.status.heartbeat(worker_info("far", None, 0, joins_groups=False), HEARTBEAT_TTL_S)
    await publish(learner, 3)
    assert (await archived(broker)).anchor is not None
    await Follower(broker, config.archive).pull()
    assert "raise weights.delta_chain" not in caplog.text


@in_directory
async def test_what_a_learner_before_has_left_goes_even_if_nobody_pulls(
    learner: Learner, config: WeightsConfig, broker: Broker, url: str, run_name: str, folder: Path
) -> None:
    await publish(learner, 3)
    await broker.status.leave("far")
    successor = await asyncio.to_thread(Learner, url, run_name, config, resume=True)
    await publish(successor)
    await asyncio.to_thread(successor.close)
    assert not files(folder)


def test_an_empty_archive_is_not_asked_again(archiver: Archiver, shelf: Shelf) -> None:
    archiver.add(FIRST, staged(), ())
    until_anchor_ends(archiver)
    archiver.clear()
    asked = shelf.tidied
    archiver.clear()
    assert (shelf.blobs, shelf.tidied) == ({}, asked)


def test_what_could_not_be_removed_is_removed_later(
    archiver: Archiver, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver.add(FIRST, staged(), ())
    until_anchor_ends(archiver)

    def fail(_: Set[str]) -> set[str]:
        raise WeightSyncError("not mounted")

    with monkeypatch.context() as patched:
        patched.setattr(shelf, "keep_only", fail)
        archiver.clear()
    assert shelf.blobs
    archiver.clear()
    assert not shelf.blobs


def test_an_anchor_that_nobody_waits_for_is_given_up(
    archiver: Archiver, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """The anchor's writer fills the archive until it hears of that; the parts that it wrote go too."""
    writes = threading.Event()

    def wait_for_the_end(deadline: Deadline) -> None:
        writes.set()
        deadline.pause(3600)
        deadline.check("writing")

    shelf.before_put = wait_for_the_end
    archiver.add(FIRST, staged(), ())
    writes.wait()
    writing = archiver._writing
    archiver.clear()
    assert writing is not None
    writing.join()
    archiver.clear()
    assert (shelf.blobs, caplog.text) == ({}, "")


def test_a_finished_anchor_holds_no_weights(archiver: Archiver) -> None:
    weights_of_first = staged()
    gone = weakref.ref(weights_of_first)
    archiver.add(FIRST, weights_of_first, ())
    until_anchor_ends(archiver)
    del weights_of_first
    assert gone() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_while_archiving_is_no_success(
    archiver: Archiver, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(_: Deadline) -> None:
        raise KeyError("a bug")

    assert archiver.add(SECOND, staged(), (DELTA,)) == Archived(None, ())
    until_anchor_ends(archiver)
    shelf.blobs.clear()
    shelf.before_put = stumble
    assert archiver.add(SECOND, staged(), (DELTA,)) is None
    assert "KeyError('a bug')" in caplog.text
