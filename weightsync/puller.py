"""Fetches announced versions for one worker: deltas bring the buckets that it holds of an earlier version up to date,
and the other buckets come whole.

Over a slow line a version may be superseded before all of its buckets have come. The puller keeps those that have, so
that the next pull goes on instead of starting over. Where a delta turns out to be wrong, the same call fetches all
buckets. Either way the result is compared with the manifest's fingerprints.

`BackgroundPuller` pulls beside the worker's other work, one version at a time, and tries again when a pull fails.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headway.broker import Broker
from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, TensorSpec, WeightManifest

from .archives import open_reader
from .archives.pull import ArchivePull
from .config import WeightsConfig
from .deliveries import BufferPool, BufferSet, Delivery
from .limits import Deadline, RateLimiter
from .tensors.buckets import allocate, check_manifest, verify
from .tensors.deltas import chain_from, patch
from .transports.base import PullTransport, SupersededError, UnreachableError
from .transports.http_pull import HttpPull
from .transports.threads import BoundedThreads, all_of
from .weights_from_files import files_first

AT_ONCE = 4
"""Connections of one pull. A single one does not fill the line: each bucket is copied, sent, copied and verified."""


@dataclass(frozen=True)
class PullResult:
    """A version's buckets, verified, and how they came."""

    buckets: tuple[torch.Tensor, ...]
    deltas: int
    """Deltas that were applied; 0: all buckets were fetched whole."""
    failure: str
    """Why deltas were of no use, or ""."""


@dataclass(frozen=True)
class _Base:
    """Verified buckets of one version, by index; some are missing where the next version came too soon."""

    version: WeightVersion
    layout: tuple[tuple[TensorSpec, ...], tuple[int, ...]]
    buckets: dict[int, torch.Tensor]


class Puller:
    """Pulls versions, one call at a time. With `keeps_base` the newest version's buckets stay in host memory."""

    def __init__(self, transport: PullTransport, keeps_base: bool) -> None:
        self._transport = transport
        self._keeps_base = keeps_base
        self._held: _Base | None = None

    def pull(
        self, manifest: WeightManifest, deadline: Deadline, landing: Sequence[torch.Tensor] | None = None
    ) -> PullResult:
        """Fetch all of `manifest`'s version, and block until it is there. Raises what PullTransport raises; the next
        call then goes on.

        Buckets that are fetched whole go into `landing`, if it is given. It must not be given with `keeps_base`.
        """
        check_manifest(manifest)
        try:
            return self._pull(manifest, deadline, landing)
        finally:
            self._transport.forget()

    def _pull(self, manifest: WeightManifest, deadline: Deadline, landing: Sequence[torch.Tensor] | None) -> PullResult:
        chain = self._chain_to(manifest)
        buckets, failure = self._patched(manifest, chain, deadline)
        self._keep(manifest, buckets)
        missing = {
            index: allocate([nbytes])[0] if landing is None else landing[index]
            for index, nbytes in enumerate(manifest.buckets)
            if index not in buckets
        }
        for index in self._fetch(manifest, missing, deadline):
            buckets[index] = missing[index]
            self._keep(manifest, buckets)
        whole = tuple(buckets[index] for index in range(len(manifest.buckets)))
        return PullResult(whole, 0 if failure else len(chain), failure)

    def _fetch(
        self, manifest: WeightManifest, missing: Mapping[int, torch.Tensor], deadline: Deadline
    ) -> Iterator[int]:
        """Fill the `missing` buckets and yield the index of each once it is there: one after another with `keeps_base`,
        several at a time otherwise, as then nothing is kept of a pull that is cut off."""
        if self._keeps_base:
            for index, bucket in missing.items():
                self._transport.pull_bucket(manifest, index, bucket, deadline)
                yield index
            return
        fetching = [
            partial(self._transport.pull_bucket, manifest, index, bucket, deadline) for index, bucket in missing.items()
        ]
        all_of("pull", AT_ONCE, fetching, deadline)  # no thread may still write to buckets that are used next
        yield from missing

    def _chain_to(self, manifest: WeightManifest) -> tuple[DeltaSpec, ...]:
        """Return the deltas from the held version to `manifest`'s. Where there is no such chain, or it would save
        nothing, the held version is forgotten."""
        held = self._held
        if held is None:
            return ()
        chain = chain_from(held.version, manifest)
        is_on_the_way = bool(chain) or held.version == manifest.version
        is_saving = sum(delta.nbytes for delta in chain) < sum(bucket.numel() for bucket in held.buckets.values())
        if held.layout == _layout(manifest) and is_on_the_way and is_saving:
            return chain
        self._held = None
        return ()

    def _patched(
        self, manifest: WeightManifest, chain: tuple[DeltaSpec, ...], deadline: Deadline
    ) -> tuple[dict[int, torch.Tensor], str]:
        """Return the held buckets, brought up to `manifest`'s version, and what went wrong, or "". The held ones stay
        as they are: an engine may be reading them."""
        if self._held is None:
            return {}, ""
        buckets = {index: _copy(bucket) if chain else bucket for index, bucket in self._held.buckets.items()}
        try:
            for delta in chain:
                patch(buckets, manifest.tensors, self._transport.pull_delta(manifest, delta, deadline))
            verify(manifest, buckets)
        except (SupersededError, UnreachableError):
            raise  # the held buckets are still good
        except MemoryError as error:
            raise NoRoomError(f"no memory to patch what is held to version {manifest.version}") from error
        except WeightSyncError as error:
            deadline.check("pull")
            self._held = None
            return {}, f"deltas were of no use, all of it was fetched: {error}"
        return buckets, ""

    def _keep(self, manifest: WeightManifest, buckets: dict[int, torch.Tensor]) -> None:
        """Keep `buckets` as the base. Called after every bucket, as the version may be superseded before the next."""
        if self._keeps_base and buckets:
            self._held = _Base(manifest.version, _layout(manifest), dict(buckets))


def _copy(bucket: torch.Tensor) -> torch.Tensor:
    return allocate([bucket.numel()])[0].copy_(bucket)


def _layout(manifest: WeightManifest) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Return where every tensor lies, and the buckets' sizes, to compare two versions."""
    return manifest.tensors, manifest.buckets


logger = logging.getLogger(__name__)
_RETRY_S = (0.2, 0.5, 1.0, 2.0)


class BackgroundPuller:
    """Pulls versions in the broker's event loop, from the first `start` until `stop`, and after the next `start`."""

    def __init__(
        self,
        broker: Broker,
        worker: str,
        config: WeightsConfig,
        landing: BufferPool | None,
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

    def _land(self, manifest: WeightManifest, deadline: Deadline) -> tuple[BufferSet, PullResult]:
        if self._landing is None:
            pulled = self._puller.pull(manifest, deadline)
            return BufferSet(pulled.buckets), pulled
        landed = self._landing.take(manifest.buckets)
        try:
            pulled = self._puller.pull(manifest, deadline, landed.buckets)
            deadline.check("pull")  # a pull that was stopped at its last byte is not delivered
        except WeightSyncError:
            self._landing.give_back(landed)
            raise
        return landed, pulled


def _open_pull(broker: Broker, config: WeightsConfig, model: Path | None = None) -> PullTransport:
    rate_limiter = RateLimiter(config.pull_bytes_per_s)
    learner: PullTransport = HttpPull(config.broadcast_timeout_s, rate_limiter)
    reader = open_reader(config.archive, broker, config.broadcast_timeout_s)
    if reader is not None:
        learner = ArchivePull(reader, learner, rate_limiter)
    return files_first(model, learner)


def _how(pulled: PullResult) -> str:
    return f"by {pulled.deltas} deltas" if pulled.deltas else "whole"
