# mypy: disable-error-code="arg-type"
"""A worker without an engine that pulls when the test says so, and counts what it reads.

Where a test is about the archive's contents, the learner does not answer it (`NoLearner`).
"""

import asyncio
import math
from pathlib import Path

import pytest

from headway.broker import Broker
from headway.broker.schema.weights import Archived, WeightManifest
from headway.weightsync.archives import ArchiveReader, open_reader
from headway.weightsync.archives.pull import ArchivePull
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.puller import Puller, PullResult
from headway.weightsync.tensors.buckets import views
from headway.weightsync.tensors.staging import stage
from headway.weightsync.transports.base import UnreachableError
from headway.weightsync.transports.http_pull import HttpPull
from tests.weightsync.conftest import CONFIG, TIMEOUT_S, Learner, announced, weights
from tests.weightsync.worker_process import fingerprint

FOREVER = Deadline(math.inf)
WHOLE_BYTES = stage(weights(0), CONFIG.bucket_bytes).nbytes
NAME = f"delta-1.0-{'0' * 32}"
in_directory = pytest.mark.parametrize("config", ["file"], indirect=True)
in_broker = pytest.mark.parametrize("config", ["broker"], indirect=True)


class NoLearner:
    """A learner that cannot be reached."""

    def pull_bucket(self, manifest: WeightManifest, *_: object) -> int:
        raise UnreachableError("the learner was asked")

    def pull_delta(self, manifest: WeightManifest, *_: object) -> memoryview:
        raise UnreachableError("the learner was asked")

    def forget(self) -> None:
        """There is nothing to forget."""


class CountingRateLimiter(RateLimiter):
    """A rate limiter without a limit, which counts the bytes."""

    def __init__(self) -> None:
        super().__init__(None)
        self._pieces: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(self._pieces)

    def wait(self, moved: int, deadline: Deadline) -> None:
        self._pieces.append(moved)


class Follower:
    """Pulls when the test says so."""

    def __init__(self, broker: Broker, archive: str, *, keeps_base: bool = True, only_archive: bool = True) -> None:
        self._broker = broker
        self.rate_limiter = CountingRateLimiter()
        reader = open_reader(archive, broker, TIMEOUT_S)
        assert reader is not None
        self.reader: ArchiveReader = reader
        learner = NoLearner() if only_archive else HttpPull(TIMEOUT_S, self.rate_limiter)
        self._puller = Puller(ArchivePull(reader, learner, self.rate_limiter), keeps_base)
        self.nbytes = 0

    async def pull(self, manifest: WeightManifest | None = None) -> PullResult:
        """Pull the announced version, or this one, and assert that its tensors are right."""
        manifest = manifest or await announced(self._broker)
        before = self.rate_limiter.nbytes
        pulled = await asyncio.to_thread(self._puller.pull, manifest, Deadline(math.inf))
        self.nbytes = self.rate_limiter.nbytes - before
        assert fingerprint(views(manifest.tensors, pulled.buckets)) == fingerprint(weights(manifest.version.step))
        return pulled


async def publish(learner: Learner, count: int = 1) -> None:
    """Publish so many versions; the anchor that one begins is whole before the next one comes."""
    for _ in range(count):
        await asyncio.to_thread(learner.publish)
        archiver = learner.publisher._archiver
        if archiver is not None and archiver._writing is not None:
            await asyncio.to_thread(archiver._writing.join)


async def archived(broker: Broker) -> Archived:
    found = (await announced(broker)).archived
    assert found is not None
    return found


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))
