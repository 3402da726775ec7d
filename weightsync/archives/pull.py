"""A worker's pull from an archive: a bucket is the anchor's bucket, brought up to date by the deltas that follow. What
the archive does not have comes from the learner.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema.weights import Archived, DeltaSpec, WeightManifest
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.tensors.buckets import allocate, as_bytes, digest_bytes, verify
from headway.weightsync.tensors.deltas import by_bucket, chain_from, patch
from headway.weightsync.transports.base import PullTransport, SupersededError, UnreachableError

from . import ArchiveReader, anchor_names, delta_name

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ArchivePull:
    """A PullTransport that asks the archive first. A blob that is missing there may only have been superseded: the pull
    ends and begins once more with the newest manifest, and if a blob is missing again, asks the learner. Once the
    archive has not answered, the rest of that pull asks the learner, too."""

    def __init__(self, reader: ArchiveReader, learner: PullTransport, rate_limiter: RateLimiter) -> None:
        self._reader = reader
        self._learner = learner
        self._rate_limiter = rate_limiter
        self._has_missed = self._is_missing = False
        """A blob was missing in the previous pull; a blob was missing in this one."""
        self._deltas: dict[DeltaSpec, dict[int, memoryview]] = {}
        """The deltas that lead to the version that is being fetched, each by bucket."""
        self._fetching_deltas = threading.Lock()
        self._is_given_up = False
        """The archive did not answer in this pull."""

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See PullTransport."""

        archived = manifest.archived

        def from_learner() -> None:
            self._learner.pull_bucket(manifest, index, bucket, deadline)

        if archived is None or archived.anchor is None:
            return from_learner()
        return self._first(
            lambda: self._patched_anchor(manifest, archived, index, bucket, deadline), from_learner, manifest, deadline
        )

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """See PullTransport."""

        def from_learner() -> memoryview:
            return self._learner.pull_delta(manifest, delta, deadline)

        if manifest.archived is None:
            return from_learner()
        return self._first(lambda: self._archived_delta(delta, deadline), from_learner, manifest, deadline)

    def forget(self) -> None:
        """See PullTransport."""
        self._deltas, self._is_given_up = {}, False
        self._has_missed, self._is_missing = self._is_missing, False

    def _first(
        self, from_archive: Callable[[], T], from_learner: Callable[[], T], manifest: WeightManifest, deadline: Deadline
    ) -> T:
        if self._is_given_up:
            return from_learner()
        try:
            return from_archive()
        except NoRoomError:
            raise
        except SupersededError:
            self._is_missing = True
            if not self._has_missed:
                raise
        except WeightSyncError as error:
            deadline.check("pull")
            if isinstance(error, UnreachableError):
                self._is_given_up = True
            logger.warning("Version %s comes from the learner, not from the archive: %s", manifest.version, error)
        return from_learner()

    def _archived_delta(self, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        data = memoryview(bytearray(delta.nbytes))
        self._read(delta_name(delta), data, delta.digest, deadline)
        return data

    def _patched_anchor(
        self, manifest: WeightManifest, archived: Archived, index: int, bucket: torch.Tensor, deadline: Deadline
    ) -> None:
        assert archived.anchor is not None
        chain = chain_from(archived.anchor, manifest)
        names = anchor_names(archived)
        if not chain or len(names) != len(manifest.buckets):
            raise WeightSyncError(f"the anchor {archived.anchor} does not lead to version {manifest.version}")
        fetched = bucket if bucket.device.type == "cpu" else allocate([bucket.numel()])[0]
        self._read(names[index], as_bytes(fetched), archived.digests[index], deadline)
        tensors = [spec for spec in manifest.tensors if spec.bucket == index]
        for delta in chain:
            parts = self._kept_delta(manifest, delta, deadline)
            patch({index: fetched}, tensors, parts.get(index, b""))
        if fetched is not bucket:
            bucket.copy_(fetched)
        verify(manifest, {index: bucket})

    def _kept_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> dict[int, memoryview]:
        """Return a delta by bucket, which is fetched for the first bucket that needs it."""
        with self._fetching_deltas:
            parts = self._deltas.get(delta)
            if parts is None:
                deadline.check("pull")
                parts = by_bucket(manifest.tensors, self.pull_delta(manifest, delta, deadline))
                self._deltas[delta] = parts
            return parts

    def _read(self, name: str, data: memoryview, digest: str, deadline: Deadline) -> None:
        self._reader.read(name, data, self._rate_limiter, deadline)
        if (found := digest_bytes(data)) != digest:
            raise WeightSyncError(f"{name} is damaged in the archive: its digest is {found}")
