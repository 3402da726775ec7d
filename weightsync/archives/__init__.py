"""Archives: places besides the learner's memory from which workers pull published weights.

    weights.archive   file:///DIRECTORY  shared with the workers, or copied to them by other means
                      broker             small weights, in the server's memory
                      none               no archive: workers pull from the learner (`transports/http_pull.py`)

    learner ──► archiver.py ──► Archive │ directory.py, broker.py │ ArchiveReader ──► pull.py ──► worker

An archive holds blobs, named by version and digest: those of an anchor, which is a whole version, bucket by bucket, and
the deltas that lead on from it. A blob's name begins with its kind and version, `anchor-INCARNATION.STEP-` or
`delta-INCARNATION.STEP-`, and ends with its digest, so it is never written with two contents.

The invariant: an archive may fail at any time. The learner serves every version by itself, too, and a worker fetches a
blob that is missing or damaged in the archive from the learner.
"""

from collections.abc import Set
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from headway.broker import BlockingBroker, Broker
from headway.broker.schema import Owner, WeightVersion
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


def open_archive(archive: str, broker: BlockingBroker, owner: Owner) -> Archive | None:
    """Return the learner's end, None for `none`. Raises WeightSyncError for a directory that it cannot write to."""
    match archive:
        case "none":
            return None
        case "broker":
            from .broker import BrokerArchive

            return BrokerArchive(broker, owner)
    from .directory import DirectoryArchive

    return DirectoryArchive(_directory(archive), broker.broker.run, owner.incarnation)


def open_reader(archive: str, broker: Broker, timeout_s: float) -> ArchiveReader | None:
    """Return a worker's end, None for `none`, which waits `timeout_s` for each piece. Call it in the thread of the
    broker's event loop; its `read` may be called in any other thread."""
    match archive:
        case "none":
            return None
        case "broker":
            from .broker import BrokerReader

            return BrokerReader(broker, timeout_s)
    from .directory import DirectoryReader

    return DirectoryReader(_directory(archive), broker.run, timeout_s)


def _directory(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
