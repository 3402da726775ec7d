"""Workers that pull from an archive find these versions there, and superseded ones do not stay."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.weightsync import puller
from headway.weightsync.archives import anchor_names, delta_name
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.transports.base import SupersededError
from tests.weightsync.archives.follower import (
    FOREVER,
    NAME,
    WHOLE_BYTES,
    Follower,
    NoLearner,
    archived,
    files,
    in_directory,
    publish,
)
from tests.weightsync.conftest import InProcessWorker, Learner, WorkerProcess, announced


@pytest.mark.parametrize("keeps_base", [True, False])
async def test_a_newcomer_finds_every_version_in_the_archive(
    learner: Learner, config: WeightsConfig, broker: Broker, keeps_base: bool
) -> None:
    await publish(learner)
    assert (await announced(broker)).archived is None  # its anchor is still being written
    for _ in range(11):
        await publish(learner)
        newcomer = Follower(broker, config.archive, keeps_base=keeps_base)
        assert (await newcomer.pull()).deltas == 0
        deltas = (await announced(broker)).deltas
        anchor = (await archived(broker)).anchor
        assert anchor is not None
        since = sum(delta.nbytes for delta in deltas if delta.version > anchor)
        assert newcomer.nbytes == WHOLE_BYTES + since


async def test_a_follower_takes_its_deltas_from_the_archive(
    learner: Learner, config: WeightsConfig, broker: Broker
) -> None:
    await publish(learner, 2)
    follower = Follower(broker, config.archive)
    await follower.pull()
    for missed in (0, 1, 3):
        await publish(learner, 1 + missed)
        pulled = await follower.pull()
        assert (pulled.deltas, pulled.failure) == (1 + missed, "")
        assert follower.nbytes < WHOLE_BYTES


async def test_what_no_chain_needs_is_removed(learner: Learner, config: WeightsConfig, broker: Broker) -> None:
    follower = Follower(broker, config.archive)
    await publish(learner, 3)
    early = await announced(broker)
    assert early.archived is not None
    await publish(learner, 8)
    for name in (*anchor_names(early.archived), delta_name(early.deltas[0])):
        with pytest.raises(SupersededError):
            await asyncio.to_thread(follower.reader.read, name, memoryview(bytearray(1)), RateLimiter(None), FOREVER)
    await follower.pull()


@in_directory
async def test_a_directory_holds_a_bounded_number_of_files(
    learner: Learner, config: WeightsConfig, broker: Broker, folder: Path
) -> None:
    await publish(learner, 12)
    held = sum(path.stat().st_size for path in files(folder))
    deltas = sum(delta.nbytes for delta in (await announced(broker)).deltas)
    assert held <= 3 * WHOLE_BYTES + 2 * deltas
    assert not files(folder, "*.part")


@in_directory
async def test_a_new_incarnation_removes_what_the_one_before_left(
    learner: Learner, config: WeightsConfig, broker: Broker, url: str, run_name: str, folder: Path
) -> None:
    await publish(learner, 3)
    (folder / "README").write_text("not ours")
    (folder / f"{NAME}.part").write_bytes(b"of a learner that was killed")
    successor = await asyncio.to_thread(Learner, url, run_name, config, resume=True)
    try:
        await publish(successor, 2)
        assert {path.name.split(".")[0].split("-")[-1] for path in files(folder)} == {"README", "2"}
        await Follower(broker, config.archive).pull()
    finally:
        await asyncio.to_thread(successor.close)


@in_directory
async def test_a_synchronised_copy_serves_as_well(
    learner: Learner, broker: Broker, folder: Path, tmp_path: Path
) -> None:
    await publish(learner, 2)
    copy = tmp_path / "copy"
    folder.parent.rename(copy)
    folder.parent.mkdir()
    await Follower(broker, f"file://{copy}").pull()


@pytest.mark.parametrize("config", ["file", "broker", "none"], indirect=True)
async def test_a_slow_line_is_kept_under_its_rate(learner: Learner, config: WeightsConfig, broker: Broker) -> None:
    """The clock of the test adds up pauses instead of making them."""
    paused = 0.0

    class Clock(Deadline):
        def pause(self, seconds: float) -> None:
            nonlocal paused
            paused = max(paused, seconds)

    await publish(learner, 2)
    rate, manifest = 1 << 16, await announced(broker)
    transport = puller._open_pull(broker, replace(config, pull_bytes_per_s=rate))
    bucket = torch.empty(manifest.buckets[0], dtype=torch.uint8)
    await asyncio.to_thread(transport.pull_bucket, manifest, 0, bucket, Clock(math.inf))
    assert paused > bucket.numel() / rate / 2 > 0.25


async def test_real_workers_follow_by_the_archive(
    learner: Learner,
    config: WeightsConfig,
    start_inside: Callable[..., InProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await publish(learner, 2)
    monkeypatch.setattr(puller, "HttpPull", lambda *_, **__: NoLearner())
    worker = start_inside("far", replace(config, follow="pull", pull_bytes_per_s=1 << 30))
    for _ in range(6):
        await worker.next()
        await publish(learner)
    assert worker.subscriber.last_error == ""


async def test_processes_follow_a_learner_that_serves_nothing(
    learner: Learner, config: WeightsConfig, start_worker: Callable[..., WorkerProcess]
) -> None:
    """One process follows by pull; the other joins groups once it has pulled its first version."""
    learner.publisher._pull_server.find = lambda path: None  # type: ignore[method-assign]
    await publish(learner, 2)
    far = start_worker("far", "pull", archive=config.archive)
    joiner = start_worker("joiner", archive=config.archive)
    for worker in (far, joiner):
        await asyncio.to_thread(worker.expect, learner.version)
    for _ in range(4):
        await publish(learner)
        (event,) = await asyncio.to_thread(far.events, learner.version)
        assert event["last_error"] == ""
