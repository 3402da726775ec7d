"""Archives: places besides the learner's memory from which workers pull published weights.

    weights.archive   file:///DIRECTORY  shared with the workers, or copied to them by other means
                      broker             small weights, in the server's memory
                      none               no archive: workers pull from the learner (`transports/http/`)

    learner ──► archiver.py ──► Archive │ directory.py, broker.py │ ArchiveReader ──► pull.py ──► worker

An archive holds blobs, named by version and digest: those of an anchor, which is a whole version, bucket by bucket, and
the deltas that lead on from it.

The invariant: an archive may fail at any time. The learner serves every version by itself, too, and a worker fetches a
blob that is missing or damaged in the archive from the learner.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from headway.broker import BlockingBroker, Broker
from headway.broker.owner import Owner

from .base import Archive, ArchiveReader


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
