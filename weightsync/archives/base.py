"""The seams between what is archived and where: blobs by name, written by one learner and read by any worker.

A blob's name begins with its kind and version, `anchor-INCARNATION.STEP-` or `delta-INCARNATION.STEP-`, and ends with
its digest, so it is never written with two contents.
"""

from collections.abc import Set
from typing import Protocol

from broker.schema import Archived, DeltaSpec, WeightVersion
from weightsync.deadline import Deadline
from weightsync.pace import Pace


class Archive(Protocol):
    """The learner's end. Every call raises HeadwayError where it cannot be done, and may be tried again; from any
    thread."""

    def reserve(self, nbytes: int) -> None:
        """Refuses an anchor of so many bytes that would not fit. What it lets pass may still be refused by `put`."""
        ...

    def put(self, name: str, data: memoryview, deadline: Deadline) -> None:
        """Readers see all of it or nothing. Putting what is there changes nothing."""
        ...

    def keep_only(self, names: Set[str]) -> set[str]:
        """Remove all that this run has put there but these, of which it tells those that are there."""
        ...


class ArchiveReader(Protocol):
    """A worker's end. Calls block, from any thread, and may be made at the same time."""

    def read(self, name: str, data: memoryview, pace: Pace, deadline: Deadline) -> None:
        """Fill `data` with the blob. Raises SupersededError where it is gone, UnreachableError where nothing comes for
        so long that the archive may hang, and WeightSyncError where it has another size, or cannot be read.
        Leaves `data` alone from then on."""
        ...


def anchor_name(version: WeightVersion, index: int, digest: str) -> str:
    """Of one bucket of a whole version."""
    return f"anchor-{version}-{index}-{digest}"


def delta_name(delta: DeltaSpec) -> str:
    """Of what leads to the delta's version."""
    return f"delta-{delta.version}-{delta.digest}"


def anchor_names(archived: Archived) -> list[str]:
    """Of the anchor's buckets; empty where there is none."""
    if archived.anchor is None:
        return []
    return [anchor_name(archived.anchor, index, digest) for index, digest in enumerate(archived.digests)]
