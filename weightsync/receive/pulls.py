"""A worker's pulls of announced versions: in the background, one at a time, tried again when they fail."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.weightsync.archives import open_reader
from headway.weightsync.archives.pull import ArchivePull
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deadline import Deadline
from headway.weightsync.pace import Pace
from headway.weightsync.tensors.landing import Landed, Landing
from headway.weightsync.transports.base import PullTransport, SupersededError
from headway.weightsync.transports.http.pull import HttpPull
from headway.weightsync.transports.threads import BoundedThreads

from .deliveries import Delivery
from .model_files import files_first
from .puller import Pulled, Puller

logger = logging.getLogger(__name__)
_RETRY_S = (0.2, 0.5, 1.0, 2.0)


class Pulls:
    """Pulls in the broker's event loop, from the first `start` until `stop`; they may be started again after that."""

    def __init__(
        self,
        broker: Broker,
        worker: str,
        config: WeightsConfig,
        landing: Landing | None,
        on_pulled: Callable[[Delivery], None],
        on_failure: Callable[[str, WeightVersion, WeightSyncError | str], None],
        model: Path | None = None,
    ) -> None:
        """A pulled version lies in memory of `landing`, to which it must be given back; None: in memory of its own.
        `model`: a directory that may hold the first version; None: there is none on this machine.

        `on_failure` is called with the reason when a pull fails, and when a version had to be fetched whole instead of
        by deltas.
        """
        self._broker = broker
        self._worker = worker
        self._landing = landing
        self._on_pulled = on_pulled
        self._on_failure = on_failure
        self._puller = Puller(_open_pull(broker, config, model), keeps_base=not config.joins_groups)
        self._threads = BoundedThreads()
        self._pulling: asyncio.Task[None] | None = None
        self._failures = 0

    def start(self) -> None:
        """Pull the newest announced version, unless a pull is under way. Raises the broker's error that ended the last
        pull."""
        if self._pulling is not None:
            if not self._pulling.done():
                return
            ended, self._pulling = self._pulling, None  # before it raises, so that the next call is a new attempt
            ended.result()
        if self._threads.are_idle:  # the thread of a stopped pull may not have ended yet
            self._pulling = asyncio.create_task(self._pull())

    async def stop(self, patience_s: float) -> None:
        """Give up the pull under way, and wait at most `patience_s` until its memory has been given back."""
        if self._pulling is not None:
            pulling, self._pulling = self._pulling, None
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
        await self._threads.stop(patience_s)

    async def _pull(self) -> None:
        manifest = await self._broker.versions.announced()
        if manifest is None:
            return
        cancelled = threading.Event()
        try:
            landed, pulled = await self._threads.run(
                "pull", lambda: self._land(manifest, Deadline(math.inf, cancelled)), cancelled, overdue_s=None
            )
            self._on_pulled(Delivery(manifest, landed, may_be_reused=self._landing is not None))
            self._failures = 0
            logger.info("%s: version %s pulled %s", self._worker, manifest.version, _how(pulled))
            if pulled.failure:
                self._on_failure("pull", manifest.version, pulled.failure)
        except SupersededError:
            logger.info("%s: version %s was superseded while it was pulled", self._worker, manifest.version)
            await asyncio.sleep(_RETRY_S[0])  # the newer version's manifest may not be announced yet
        except WeightSyncError as error:
            self._on_failure("pull", manifest.version, error)
            self._failures += 1
            await asyncio.sleep(_RETRY_S[min(self._failures, len(_RETRY_S)) - 1])

    def _land(self, manifest: WeightManifest, deadline: Deadline) -> tuple[Landed, Pulled]:
        if self._landing is None:
            pulled = self._puller.pull(manifest, deadline)
            return Landed(pulled.buckets), pulled
        landed = self._landing.take(manifest.buckets)
        try:
            pulled = self._puller.pull(manifest, deadline, landed.buckets)
            deadline.check("pull")  # a pull that was stopped at its last byte is not delivered
        except WeightSyncError:
            self._landing.give_back(landed)
            raise
        return landed, pulled


def _open_pull(broker: Broker, config: WeightsConfig, model: Path | None = None) -> PullTransport:
    pace = Pace(config.pull_bytes_per_s)
    learner: PullTransport = HttpPull(config.broadcast_timeout_s, pace)
    reader = open_reader(config.archive, broker, config.broadcast_timeout_s)
    if reader is not None:
        learner = ArchivePull(reader, learner, pace)
    return files_first(model, learner)


def _how(pulled: Pulled) -> str:
    return f"by {pulled.deltas} deltas" if pulled.deltas else "whole"
