"""One version that the learner serves to those who pull, and how long it is kept for them once there is a newer one."""

import logging
import math
import threading
import time

import torch

from weightsync.buckets import as_bytes

logger = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""After so long a reader has everything or is gone: between two buckets it copies and verifies one."""


class ServedVersion:
    """Buckets in host memory as they are; others through copies, which are made once somebody has begun to read."""

    def __init__(self, buckets: tuple[torch.Tensor, ...], *, memory_is_reused: bool) -> None:
        self._buckets = buckets
        self._memory_is_reused = memory_is_reused
        self._copies: dict[int, torch.Tensor] = {}
        self._copying = threading.Condition()
        self._copier: threading.Thread | None = None
        self._are_all_tried = False
        self._is_released = False
        self._needed_at = -math.inf

    @property
    def is_needed(self) -> bool:
        """Somebody reads it who would have to start over with a newer one."""
        return time.monotonic() - self._needed_at < PATIENCE_S

    def need(self) -> None:
        """To be called again and again by such a reader."""
        self._needed_at = time.monotonic()

    def read(self, index: int) -> memoryview | None:
        """Of one bucket; None if there is none. Waits for its copy."""
        if not 0 <= index < len(self._buckets):
            return None
        if not self._memory_is_reused:
            return as_bytes(self._buckets[index].cpu())
        with self._copying:
            if self._copier is None and not self._is_released:
                self._copier = threading.Thread(target=self._copy_all, name="weights-copy", daemon=True)
                self._copier.start()
            self._copying.wait_for(lambda: index in self._copies or self._are_all_tried or self._is_released)
            if index in self._copies:
                return as_bytes(self._copies[index])
            return None if self._is_released else as_bytes(self._buckets[index].cpu())

    def release(self) -> bool:
        """The buckets are about to be overwritten. False: not all of them have been copied, so no more is served."""
        with self._copying:
            self._is_released = True
            self._copying.notify_all()
            return not self._memory_is_reused or len(self._copies) == len(self._buckets)

    def _copy_all(self) -> None:
        """In the order in which they are read. The lock keeps a bucket from being overwritten while it is copied."""
        try:
            for index, bucket in enumerate(self._buckets):
                with self._copying:
                    if self._is_released:
                        return
                    self._copies[index] = bucket.to("cpu", copy=True)
                    self._copying.notify_all()
        except (MemoryError, RuntimeError) as error:  # torch says so in either way
            logger.warning("no memory to copy weights for those who pull, who get them bucket by bucket: %s", error)
        finally:
            with self._copying:
                self._are_all_tried = True
                self._copying.notify_all()
