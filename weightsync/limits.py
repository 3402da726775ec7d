"""Limits of an operation: the deadline at which it is given up, with a flag that ends it sooner, and the rate below
which a transfer stays, so that it does not fill a line that it shares.
"""

import threading
import time
from collections.abc import Callable

from headway.broker.errors import WeightSyncError


class Deadline:
    """Counts down from `seconds`; `cancelled` ends it at once, from any thread."""

    def __init__(self, seconds: float, cancelled: threading.Event | None = None) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._cancelled = cancelled or threading.Event()

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def cancel(self) -> None:
        """End it now, also for every deadline that shares its flag."""
        self._cancelled.set()

    def is_over(self) -> bool:
        """Return whether the time is up or the flag is set."""
        return self._cancelled.is_set() or self.remaining() == 0.0

    def check(self, what: str) -> None:
        """Raise WeightSyncError once it is over; `what` names the operation in the message."""
        if self._cancelled.is_set():
            raise WeightSyncError(f"{what}: cancelled")
        if self.remaining() == 0.0:
            raise WeightSyncError(f"{what}: not done within {self.seconds:g} s")

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the end, and wake when cancelled."""
        self._cancelled.wait(min(seconds, self.remaining()))


_PIECE_S = 0.25
_CHUNK_BYTES = 1 << 20


class RateLimiter:
    """A token bucket: after each piece it pauses until the rate allows all pieces so far."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._due = time.monotonic()

    def fill(self, data: memoryview, read_into: Callable[[memoryview], int | None], deadline: Deadline) -> int:
        """Have `read_into` fill `data` piece by piece. Returns how many bytes came: all, or those before the source
        ended.

        Raises WeightSyncError once the deadline is over.
        """
        done = 0
        while done < len(data):
            deadline.check(f"pull, {done} of {len(data)} bytes")
            count = read_into(data[done : done + self.chunk_bytes(_CHUNK_BYTES)])
            if not count:
                break
            done += count
            self.wait(count, deadline)
        return done

    def chunk_bytes(self, most: int) -> int:
        """Return how many bytes to move before the next pause, at most `most`."""
        return most if self.bytes_per_s is None else max(1, min(most, int(_PIECE_S * self.bytes_per_s)))

    def wait(self, moved: int, deadline: Deadline) -> None:
        """Pause until the rate allows `moved` more bytes, at most until the deadline, which the caller checks."""
        if self.bytes_per_s is not None:
            now = time.monotonic()
            # Idle time saves up one piece at most: with more, a burst would fill the line.
            self._due = max(self._due, now - _PIECE_S) + moved / self.bytes_per_s
            deadline.pause(self._due - now)
