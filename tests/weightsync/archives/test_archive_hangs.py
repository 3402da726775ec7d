"""An archive that stops answering: FIFOs that no process writes to hold every process that opens or reads them."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.broker import Broker
from headway.weightsync.archives.directory import DirectoryReader
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import RateLimiter
from headway.weightsync.transports.base import UnreachableError
from tests.weightsync.archives.follower import (
    FOREVER,
    NAME,
    WHOLE_BYTES,
    Follower,
    archived,
    files,
    in_broker,
    in_directory,
    publish,
)
from tests.weightsync.conftest import TIMEOUT_S, Learner, WorkerProcess, announced

OTHER = f"delta-1.1-{'0' * 32}"


@pytest.fixture
def stall(folder: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that puts FIFOs in the places of files; at the end of the test, blocked readers go on."""
    fifos: list[Path] = []

    def replace(pattern: str) -> None:
        for path in files(folder, pattern):
            path.unlink()
            os.mkfifo(path)
            fifos.append(path)

    yield replace
    for path in fifos:
        release(path)


def release(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def read(reader: DirectoryReader, name: str, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    reader.read(name, memoryview(data), RateLimiter(None), FOREVER)
    return data


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def reader(run_folder: Path) -> DirectoryReader:
    return DirectoryReader(run_folder.parent, run_folder.name, TIMEOUT_S)


@pytest.mark.slow
@in_directory
@pytest.mark.parametrize("pattern", ["anchor-*", "delta-*"])
@pytest.mark.parametrize("follow", ["broadcast", "pull"])
async def test_a_worker_goes_on_from_the_learner_and_can_end(
    learner: Learner,
    config: WeightsConfig,
    stall: Callable[[str], None],
    start_worker: Callable[..., WorkerProcess],
    follow: str,
    pattern: str,
) -> None:
    await publish(learner, 3)
    stall(pattern)
    worker = start_worker("newcomer", follow, archive=config.archive)
    await asyncio.to_thread(worker.expect, learner.version)
    worker.send(signal.SIGINT)
    await asyncio.to_thread(worker.until_ended)


@in_directory
async def test_a_hanging_archive_is_waited_for_once_in_a_pull(
    learner: Learner,
    config: WeightsConfig,
    broker: Broker,
    stall: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await publish(learner, 3)
    assert len((await archived(broker)).digests) > 1
    stall("*")
    follower = Follower(broker, config.archive, only_archive=False)
    await follower.pull()
    assert follower.nbytes == WHOLE_BYTES
    told = [record.message for record in caplog.records if "from the learner, not from the archive" in record.message]
    assert len(told) == 1
    assert "nothing came for 2 s" in told[0]


@in_broker
async def test_a_broker_that_does_not_answer_is_waited_for_once_in_a_pull(
    learner: Learner, config: WeightsConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(learner, 3)
    asked: list[object] = []

    async def never(*what: object) -> bytes:
        asked.append(what)
        await asyncio.Event().wait()
        raise AssertionError

    follower = Follower(broker, config.archive, only_archive=False)
    manifest = await announced(broker)
    with monkeypatch.context() as patched:
        patched.setattr(broker.archive, "read", never)
        await follower.pull(manifest)
    assert len(asked) == 1
    await publish(learner)
    await Follower(broker, config.archive).pull()


def test_nothing_is_read_while_an_earlier_call_hangs(reader: DirectoryReader, run_folder: Path) -> None:
    os.mkfifo(run_folder / NAME)
    (run_folder / OTHER).write_bytes(b"x")
    with pytest.raises(UnreachableError, match="nothing came for"):
        read(reader, NAME, 1)
    with pytest.raises(UnreachableError, match="an earlier call hangs there"):
        read(reader, OTHER, 1)
    hanging = set(reader._left)
    release(run_folder / NAME)
    wait(hanging)
    assert read(reader, OTHER, 1) == b"x"


def test_what_comes_too_late_touches_nothing(
    reader: DirectoryReader, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(run_folder / NAME)
    writer = os.open(run_folder / NAME, os.O_RDWR)
    os.write(writer, b"in ")
    data = bytearray(9)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=len(data)))
        with pytest.raises(UnreachableError):
            reader.read(NAME, memoryview(data), RateLimiter(None), FOREVER)
    (late,) = reader._left
    os.write(writer, b"time")
    assert late.result() == b"time"
    assert data == b"in \0\0\0\0\0\0"
    os.close(writer)
