"""Where published weights lie besides the learner's memory, so that whoever pulls them need not ask the learner.

    weights.archive   file:///DIRECTORY  shared with the workers, or copied to them by other means
                      broker             small weights, in the server's memory
                      http               none: what is pulled comes from the learner (`http/pull_server.py`)

    learner ──► archiver.py ──► Archive │ directory.py, broker.py │ ArchiveReader ──► pull.py ──► worker

What is archived is blobs, named by version and digest: an anchor, which is a whole version, bucket by bucket, and the
deltas that lead on from it. The learner serves every version by itself too, so an archive may fail at any time: what a
worker does not find there, or finds damaged, it fetches from the learner.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from broker import BlockingBroker, Broker
from broker.owner import Owner

from .base import Archive, ArchiveReader


def open_archive(archive: str, broker: BlockingBroker, owner: Owner) -> Archive | None:
    """The learner's end. Raises WeightSyncError for a directory that it cannot write to."""
    match archive:
        case "http":
            return None
        case "broker":
            from .broker import BrokerArchive

            return BrokerArchive(broker, owner)
    from .directory import DirectoryArchive

    return DirectoryArchive(_directory(archive), broker.broker.run, owner.incarnation)


def open_reader(archive: str, broker: Broker, timeout_s: float) -> ArchiveReader | None:
    """A worker's end, which waits so long for each piece. Call it where the broker's event loop runs; what it reads, it
    reads from other threads."""
    match archive:
        case "http":
            return None
        case "broker":
            from .broker import BrokerReader

            return BrokerReader(broker, timeout_s)
    from .directory import DirectoryReader

    return DirectoryReader(_directory(archive), broker.run, timeout_s)


def _directory(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
