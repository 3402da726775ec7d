"""The seams of an archive: blobs by name, which one learner writes and any worker reads.

A blob's name begins with its kind and version, `anchor-INCARNATION.STEP-` or `delta-INCARNATION.STEP-`, and ends with
its digest, so it is never written with two contents.
"""

from collections.abc import Set
from typing import Protocol

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Archived, DeltaSpec
from headway.weightsync.limits import Deadline, RateLimiter


class Archive(Protocol):
    """The learner's end of an archive. Every call raises HeadwayError where it fails and may then be tried again. Calls
    may come from any thread."""

    def reserve(self, nbytes: int) -> None:
        """Raise HeadwayError if an anchor of `nbytes` would not fit. `put` may fail nevertheless."""
        ...

    def put(self, name: str, data: memoryview, deadline: Deadline) -> None:
        """Store a blob. Readers see all of it or nothing. Putting a blob that is there changes nothing."""
        ...

    def keep_only(self, names: Set[str]) -> set[str]:
        """Remove all blobs of this run except `names`. Returns those of `names` that are there."""
        ...


class ArchiveReader(Protocol):
    """A worker's end of an archive. Calls block; they may come from several threads at the same time."""

    def read(self, name: str, data: memoryview, rate_limiter: RateLimiter, deadline: Deadline) -> None:
        """Fill `data` with the blob. Raises SupersededError where it is gone, UnreachableError where the archive has
        not answered for its time limit, and WeightSyncError where the blob has another size or cannot be read. `data`
        is not written to after the call."""
        ...


def anchor_name(version: WeightVersion, index: int, digest: str) -> str:
    """Return the name of one bucket of an anchor."""
    return f"anchor-{version}-{index}-{digest}"


def delta_name(delta: DeltaSpec) -> str:
    """Return the name of the delta that leads to its version."""
    return f"delta-{delta.version}-{delta.digest}"


def anchor_names(archived: Archived) -> list[str]:
    """Return the names of the anchor's buckets; none where there is no anchor."""
    if archived.anchor is None:
        return []
    return [anchor_name(archived.anchor, index, digest) for index, digest in enumerate(archived.digests)]
