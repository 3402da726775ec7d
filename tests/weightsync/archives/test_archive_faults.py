"""The learner serves the weights itself where a disk is full, files are damaged or a directory is missing."""

import asyncio
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.weightsync import puller
from headway.weightsync.archives import anchor_names, delta_name
from headway.weightsync.archives.directory import DirectoryArchive, DirectoryReader
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import RateLimiter
from headway.weightsync.transports.base import SupersededError, UnreachableError
from tests.weightsync.archives.follower import (
    FOREVER,
    NAME,
    WHOLE_BYTES,
    Follower,
    archived,
    files,
    in_directory,
    publish,
)
from tests.weightsync.conftest import TIMEOUT_S, Learner, announced


@in_directory
async def test_a_full_disk_costs_a_warning_and_the_learner_serves(
    learner: Learner,
    config: WeightsConfig,
    broker: Broker,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await publish(learner, 3)
    follower = Follower(broker, config.archive, only_archive=False)
    await follower.pull()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        await publish(learner, 2)
    assert "No space left on device" in caplog.text
    assert (await announced(broker)).archived is None
    assert not files(folder, "*.part")
    assert (await follower.pull()).deltas == 2
    await publish(learner, 2)  # there is room again, also for the files that were left out
    assert (await follower.pull()).deltas == 2
    await Follower(broker, config.archive).pull()


@in_directory
async def test_too_little_room_for_a_whole_version_is_told_before_it_is_written(
    learner: Learner,
    broker: Broker,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Usage:
        free = WHOLE_BYTES - 1

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    await publish(learner, 3)
    assert f"has {WHOLE_BYTES - 1} bytes free, and a whole version needs {WHOLE_BYTES}" in caplog.text
    assert (await archived(broker)).anchor is None
    assert {path.name.partition("-")[0] for path in files(folder)} == {"delta"}


@in_directory
async def test_a_file_system_that_hangs_holds_the_learner_for_the_deadline_only(
    learner: Learner, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(learner, 2)
    hanging = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: hanging.wait(20))
    for _ in range(2):
        await asyncio.to_thread(learner.publish)
        assert (await announced(broker)).archived is None
    assert "not done in time" in caplog.text
    assert "has not ended yet" in caplog.text
    hanging.set()


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@in_directory
@pytest.mark.parametrize("kind", ["anchor", "delta"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_damage, "is damaged in the archive: its digest is"),
        (_truncate, " bytes instead of "),
    ],
)
async def test_what_is_spoilt_in_the_archive_comes_from_the_learner(
    learner: Learner,
    config: WeightsConfig,
    broker: Broker,
    folder: Path,
    kind: str,
    spoil: Callable[[Path], None],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await publish(learner, 3)
    for path in files(folder, f"{kind}-*"):
        spoil(path)
    assert (await Follower(broker, config.archive, only_archive=False).pull()).deltas == 0
    assert told in caplog.text
    with pytest.raises(UnreachableError, match="the learner was asked"):
        await Follower(broker, config.archive).pull()


@in_directory
async def test_bytes_of_another_version_under_a_right_name_are_found(
    learner: Learner, config: WeightsConfig, broker: Broker, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(learner, 5)
    deltas = (await announced(broker)).deltas
    older, newer = (folder / delta_name(delta) for delta in deltas[-2:])
    newer.write_bytes(older.read_bytes()[: newer.stat().st_size].ljust(newer.stat().st_size))
    await Follower(broker, config.archive, only_archive=False).pull()
    assert "is damaged in the archive" in caplog.text


@in_directory
async def test_a_file_removed_in_mid_read_is_superseded_then_the_learners(
    learner: Learner, config: WeightsConfig, broker: Broker, folder: Path
) -> None:
    await publish(learner, 3)
    manifest = await announced(broker)
    assert manifest.archived is not None
    last = anchor_names(manifest.archived)[-1]
    follower = Follower(broker, config.archive, only_archive=False)
    read = follower.reader.read

    def vanishing(name: str, *rest: object) -> None:
        read(name, *rest)  # type: ignore[arg-type]
        (folder / last).unlink(missing_ok=True)

    follower.reader.read = vanishing  # type: ignore[assignment, method-assign]
    with pytest.raises(SupersededError):
        await follower.pull(manifest)
    await follower.pull(manifest)
    await publish(learner, 2)  # the learner finds the anchor gone, and writes another one
    await Follower(broker, config.archive).pull()


@in_directory
@pytest.mark.parametrize("late", [r".*", r"anchor-.*-1-.*"])
async def test_a_worker_whose_copy_of_the_archive_lags_asks_the_learner(
    learner: Learner, config: WeightsConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """`late` matches the names of files that are not there yet; the first bucket may be there."""
    monkeypatch.setattr(puller, "AT_ONCE", 1)
    follower = Follower(broker, config.archive, keeps_base=False, only_archive=False)
    read = follower.reader.read

    def lagging(name: str, *rest: object) -> None:
        if re.fullmatch(late, name):
            raise SupersededError(f"{name} is not there yet")
        read(name, *rest)  # type: ignore[arg-type]

    follower.reader.read = lagging  # type: ignore[assignment, method-assign]
    await publish(learner, 3)
    with pytest.raises(SupersededError):
        await follower.pull()
    await publish(learner)  # every attempt meets a newer version
    await follower.pull()


@in_directory
async def test_a_worker_without_the_directory_asks_the_learner(
    learner: Learner, broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(learner, 2)
    await Follower(broker, f"file://{tmp_path}/elsewhere", only_archive=False).pull()
    assert "or not mounted here?" in caplog.text


def test_a_learner_is_told_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"no directory that this process may write to.*weights\.archive=none"):
        DirectoryArchive(tmp_path / "nowhere", "run", 1)


def test_names_lead_out_of_no_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "run").mkdir()
    with pytest.raises(WeightSyncError, match="is no name of anything in an archive"):
        DirectoryReader(tmp_path, "run", TIMEOUT_S).read(
            "../secret", memoryview(bytearray(1)), RateLimiter(None), FOREVER
        )


def test_a_device_that_is_full_keeps_nothing(tmp_path: Path) -> None:
    archive = DirectoryArchive(tmp_path, "run", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(WeightSyncError, match=r"No space left on device; is the file system of weights\.archive full"):
        archive.put(NAME, memoryview(b"x" * 5_000_000), FOREVER)
    assert not files(tmp_path / "run")
    archive.put(NAME, memoryview(b"x"), FOREVER)
    assert archive.keep_only({NAME}) == {NAME}


@in_directory
async def test_an_archive_altered_by_one_bit_is_refused(
    learner: Learner, config: WeightsConfig, broker: Broker, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker compares each file with its digest in the manifest."""
    await publish(learner, 3)
    for path in files(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
    with pytest.raises(UnreachableError, match="the learner was asked"):
        await Follower(broker, config.archive).pull()
    assert "is damaged in the archive" in caplog.text
    await Follower(broker, config.archive, only_archive=False).pull()
