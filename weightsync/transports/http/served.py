"""One version that the learner serves to workers that pull, and how long it is kept once there is a newer one."""

import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from headway.weightsync.tensors.buckets import as_bytes

logger = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""A worker that has read nothing for so long has all of the version, or is gone. Between two buckets it copies and
verifies one."""


class ServedVersion:
    """A served version. Buckets in host memory are served as they are; others through copies, which a thread makes once
    a worker has begun to read."""

    def __init__(self, buckets: tuple[torch.Tensor, ...], *, memory_is_reused: bool) -> None:
        self._buckets = buckets
        self._memory_is_reused = memory_is_reused
        self._copies: list[Future[torch.Tensor | None]] = [Future() for _ in buckets]
        self._begin = threading.Lock()
        """Taken once, by the first reader, for whom the copies are begun."""
        self._copying = threading.Lock()
        """Held while the buckets' memory is read."""
        self._is_released = False
        self._counting = threading.Lock()
        self._readers = 0
        self._left_at = -math.inf

    @property
    def is_needed(self) -> bool:
        """Whether a worker is in the middle of this version."""
        return self.is_read_now or time.monotonic() - self._left_at < PATIENCE_S

    @property
    def is_read_now(self) -> bool:
        """Whether a worker is reading a bucket of it right now; False between two buckets."""
        return self._readers > 0

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Wrap the time in which a worker reads a bucket."""
        with self._counting:
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                self._left_at = time.monotonic()

    def is_ready(self, index: int) -> bool:
        """Return whether `read` would not wait. Begins the copies."""
        if not self._memory_is_reused or not 0 <= index < len(self._buckets):
            return True
        if self._begin.acquire(blocking=False):
            threading.Thread(target=self._copy_all, name="weights-copy", daemon=True).start()
        return self._copies[index].done()

    def read(self, index: int) -> memoryview | None:
        """Return one bucket, or None where there is none or it is not served any more. Waits for its copy, and raises
        the error that kept the copy from being made."""
        if not 0 <= index < len(self._buckets):
            return None
        if not self._memory_is_reused:
            return as_bytes(self._buckets[index].cpu())
        self.is_ready(index)
        copied = self._copies[index].result()
        return None if copied is None else as_bytes(copied)

    def release(self) -> bool:
        """Note that the buckets are about to be overwritten. Returns False if not all of them have been copied, so that
        this version cannot be served any more."""
        self._is_released = True
        with self._copying:  # waits for one bucket's copy at most
            return not self._memory_is_reused or all(map(_is_made, self._copies))

    def _copy_all(self) -> None:
        """Copy the buckets in the order in which workers read them; the copy of a released bucket is None."""
        for index, copied in enumerate(self._copies):
            try:
                copied.set_result(self._copy(self._buckets[index]))
            except (MemoryError, RuntimeError) as error:  # torch raises either when memory runs out
                logger.warning("no memory to copy weights for those who pull: %s", error)
                copied.set_exception(error)

    def _copy(self, bucket: torch.Tensor) -> torch.Tensor | None:
        with self._copying:
            if self._is_released:
                return None
            # On a stream of its own the copy does not wait for training, nor training for the copy.
            own = torch.cuda.Stream(bucket.device) if bucket.is_cuda else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(own):
                return bucket.to("cpu", copy=True)


def _is_made(copied: "Future[torch.Tensor | None]") -> bool:
    return copied.done() and copied.exception() is None and copied.result() is not None
