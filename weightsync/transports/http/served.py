"""One version that the learner serves to those who pull, and how long it is kept for them once there is a newer one."""

import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from weightsync.tensors.buckets import as_bytes

logger = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""After so long whoever reads nothing has everything or is gone: between two buckets one is copied and verified."""


class ServedVersion:
    """Buckets in host memory as they are; others through copies, which are made once somebody has begun to read."""

    def __init__(self, buckets: tuple[torch.Tensor, ...], *, memory_is_reused: bool) -> None:
        self._buckets = buckets
        self._memory_is_reused = memory_is_reused
        self._copies: list[Future[torch.Tensor | None]] = [Future() for _ in buckets]
        self._begin = threading.Lock()
        """Taken by the first reader, who has the copies made."""
        self._copying = threading.Lock()
        """Held while the buckets' memory is read."""
        self._is_released = False
        self._counting = threading.Lock()
        self._readers = 0
        self._left_at = -math.inf

    @property
    def is_needed(self) -> bool:
        """Somebody is in the middle of it."""
        return self.is_read_now or time.monotonic() - self._left_at < PATIENCE_S

    @property
    def is_read_now(self) -> bool:
        """Somebody is reading a part of it, and not between two of them or gone."""
        return self._readers > 0

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Around what somebody takes to read a part of it."""
        with self._counting:
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                self._left_at = time.monotonic()

    def is_ready(self, index: int) -> bool:
        """`read` has nothing to wait for. Copies are begun."""
        if not self._memory_is_reused or not 0 <= index < len(self._buckets):
            return True
        if self._begin.acquire(blocking=False):
            threading.Thread(target=self._copy_all, name="weights-copy", daemon=True).start()
        return self._copies[index].done()

    def read(self, index: int) -> memoryview | None:
        """One bucket; None if there is none, or no more. Waits for its copy; raises what kept it from being made."""
        if not 0 <= index < len(self._buckets):
            return None
        if not self._memory_is_reused:
            return as_bytes(self._buckets[index].cpu())
        self.is_ready(index)
        copied = self._copies[index].result()
        return None if copied is None else as_bytes(copied)

    def release(self) -> bool:
        """The buckets are about to be overwritten. False: not all of them have been copied, so no more is served."""
        self._is_released = True
        with self._copying:  # at most one more is being copied
            return not self._memory_is_reused or all(map(_is_made, self._copies))

    def _copy_all(self) -> None:
        """In the order in which they are read; None for those that are released first."""
        for index, copied in enumerate(self._copies):
            try:
                copied.set_result(self._copy(self._buckets[index]))
            except (MemoryError, RuntimeError) as error:  # torch says so in either way
                logger.warning("no memory to copy weights for those who pull: %s", error)
                copied.set_exception(error)

    def _copy(self, bucket: torch.Tensor) -> torch.Tensor | None:
        with self._copying:
            if self._is_released:
                return None
            # A stream of its own keeps it from waiting for the training that goes on, and that for it.
            own = torch.cuda.Stream(bucket.device) if bucket.is_cuda else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(own):
                return bucket.to("cpu", copy=True)


def _is_made(copied: "Future[torch.Tensor | None]") -> bool:
    return copied.done() and copied.exception() is None and copied.result() is not None
