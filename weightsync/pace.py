"""Keeps a transfer below a rate, so that it does not fill a line that it shares."""

import time
from collections.abc import Callable

from .deadline import Deadline

_PIECE_S = 0.25
_CHUNK_BYTES = 1 << 20


class Pace:
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
            count = read_into(data[done : done + self.piece(_CHUNK_BYTES)])
            if not count:
                break
            done += count
            self.keep(count, deadline)
        return done

    def piece(self, most: int) -> int:
        """Return how many bytes to move before the next pause, at most `most`."""
        return most if self.bytes_per_s is None else max(1, min(most, int(_PIECE_S * self.bytes_per_s)))

    def keep(self, moved: int, deadline: Deadline) -> None:
        """Pause until the rate allows `moved` more bytes, at most until the deadline, which the caller checks."""
        if self.bytes_per_s is not None:
            now = time.monotonic()
            # Idle time saves up one piece at most: with more, a burst would fill the line.
            self._due = max(self._due, now - _PIECE_S) + moved / self.bytes_per_s
            deadline.pause(self._due - now)
