"""The learner's end of an archive: which blobs of each version go there, and how long they stay.

All deltas of the chain are archived, and from time to time an anchor, a whole version, so that some delta of the chain
always starts from an archived anchor. The learner waits for the deltas only, at most as long as for a broadcast. A
thread writes the anchor beside training, from memory that is kept until then; manifests name it from the next version
on. A blob that cannot be archived costs a warning, and workers fetch it from the learner.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence

from headway.broker.errors import HeadwayError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Archived
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.buckets import as_bytes, digest_bytes
from headway.weightsync.tensors.deltas import Delta
from headway.weightsync.tensors.staging import StagedWeights

from . import Archive, anchor_name, anchor_names, delta_name

logger = logging.getLogger(__name__)
NOTHING = Archived(None, ())


class Archiver:
    """Keeps an archive up to date for one incarnation of the learner.

    The archive holds all blobs that the newest manifest names, those that the manifest before named, which some worker
    may still be reading, and those of the anchor that is being written.
    """

    def __init__(self, archive: Archive, longest_chain: int, timeout_s: float) -> None:
        self._archive = archive
        self._every = max(1, longest_chain // 2)
        """Versions from one anchor to the next: half a chain, so that the other half is left as time to write it."""
        self._timeout_s = timeout_s
        self._is_empty = False
        """False at first: an earlier learner may have left blobs."""
        self._anchor = NOTHING
        self._named: frozenset[str] = frozenset()
        """The blobs of the previous version, which some worker may still be reading."""
        self._putting: _Job | None = None
        self._writing: _Job | None = None
        self._written: list[str] = []
        """The blobs of the anchor that is being written. Guarded by the lock, so that none is removed as a
        left-over."""
        self._lock = threading.Lock()
        self._warned = ""

    def add(self, version: WeightVersion, staged: StagedWeights, deltas: Sequence[Delta]) -> Archived | None:
        """Archive the deltas of `version`, and begin an anchor where one is due. Returns what a manifest says of it, or
        None where not all deltas are archived. `staged` lies in host memory and must not change."""
        self._is_empty = False
        self._finish_anchor()
        bases = [delta.spec.base for delta in deltas]
        if self._anchor.anchor not in bases:
            if self._anchor.anchor is not None and bases:
                self._warn_once("writing a whole version takes longer than the chain lasts: raise weights.delta_chain")
            self._anchor = NOTHING
        is_there = self._put(deltas)
        is_due = self._anchor.anchor is None or len(bases) - bases.index(self._anchor.anchor) >= self._every
        if is_due and self._writing is None and is_there:
            self._writing = _Job(
                "anchor", Deadline(math.inf), lambda deadline: self._write_anchor(version, staged, deadline)
            )
        return self._anchor if is_there and deltas else None

    def clear(self) -> None:
        """Empty the archive until the next `add`, as no worker pulls. Does nothing where it is already empty."""
        if self._is_empty:
            return
        if self._writing is not None:
            self._writing.stop()
        self._finish_anchor()
        self._anchor, self._named = NOTHING, frozenset()
        self._is_empty = self._put(()) and self._writing is None

    def close(self) -> None:
        """Stop writing. Archived blobs stay for the workers that read them."""
        jobs = [job for job in (self._putting, self._writing) if job is not None]
        for job in jobs:
            job.stop()
        for job in jobs:
            job.join(self._timeout_s)

    def _put(self, deltas: Sequence[Delta]) -> bool:
        """Return whether all `deltas` are archived in time. Forgets the anchor if it was lost."""
        if self._putting is not None and self._putting.is_alive():
            self._warn_once("what was archived for an earlier version has not ended yet")
            return False
        anchor = frozenset(anchor_names(self._anchor))
        named = anchor | {delta_name(delta.spec) for delta in deltas}
        there: set[str] = set()
        self._putting = _Job(
            "deltas", Deadline(self._timeout_s), lambda deadline: self._put_missing(deltas, named, there, deadline)
        )
        self._putting.join(self._timeout_s)
        failure = "not done in time" if self._putting.is_alive() else self._putting.failure
        self._named = named
        if not anchor <= there:
            self._anchor = NOTHING
        self._warn_once(failure)
        return not failure

    def _put_missing(self, deltas: Sequence[Delta], named: frozenset[str], there: set[str], deadline: Deadline) -> None:
        """Remove blobs that are not needed, which makes room on a full disk, and then write the missing deltas."""
        with self._lock:
            there |= self._archive.keep_only(named | self._named | {*self._written})
        for delta in deltas:
            name = delta_name(delta.spec)
            if name not in there:
                self._archive.put(name, memoryview(delta.data), deadline)

    def _write_anchor(self, version: WeightVersion, staged: StagedWeights, deadline: Deadline) -> Archived:
        self._archive.reserve(staged.nbytes)
        digests: list[str] = []
        for index, bucket in enumerate(staged.buckets):
            data = as_bytes(bucket)
            digests.append(digest_bytes(data))
            name = anchor_name(version, index, digests[-1])
            with self._lock:
                self._written.append(name)
            self._archive.put(name, data, deadline)
        return Archived(version, tuple(digests))

    def _finish_anchor(self) -> None:
        job = self._writing
        if job is None or job.is_alive():
            return
        self._writing, self._written = None, []
        if not job.is_wanted:
            return
        if job.result is not None:
            self._anchor = job.result
        self._warn_once(job.failure)

    def _warn_once(self, failure: str) -> None:
        """Log `failure`, once for as long as it stays the same."""
        if failure and failure != self._warned:
            logger.warning("workers fetch weights from the learner, not from weights.archive: %s", failure)
        self._warned = failure or self._warned


class _Job(threading.Thread):
    """Work in a daemon thread: a file system may hang, and the process must end nevertheless."""

    def __init__(self, name: str, deadline: Deadline, work: Callable[[Deadline], Archived | None]) -> None:
        super().__init__(name=f"weights-archive-{name}", daemon=True)
        self._deadline = deadline
        self._work = work
        self.result: Archived | None = None
        self.failure = ""
        """Why the work was not done, or ""."""
        self.is_wanted = True
        self.start()

    def stop(self) -> None:
        """End the work at its next piece; its result is dropped."""
        self.is_wanted = False
        self._deadline.cancel()

    def run(self) -> None:
        try:
            self.result = self._work(self._deadline)
        except HeadwayError as error:
            self.failure = str(error)
        except BaseException as error:
            self.failure = repr(error)
            raise  # a bug: its traceback must be seen
        finally:
            del self._work  # it holds a whole version
