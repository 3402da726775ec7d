"""Keeps a transfer under a rate, so that a line that others use too is not filled."""

import time
from collections.abc import Callable

from .deadline import Deadline

_PIECE_S = 0.25
_CHUNK_BYTES = 1 << 20


class Pace:
    """A token bucket: after each piece, a pause until the pieces so far may have come."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._due = time.monotonic()

    def fill(self, data: memoryview, read_into: Callable[[memoryview], int | None], deadline: Deadline) -> int:
        """How many bytes of `data` `read_into` has filled, in pieces: all, or those before its end.

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
        """How many bytes to move before the next pause, at most `most`."""
        return most if self.bytes_per_s is None else max(1, min(most, int(_PIECE_S * self.bytes_per_s)))

    def keep(self, moved: int, deadline: Deadline) -> None:
        """Pause until `moved` more bytes are due; ends with the deadline, which the caller checks."""
        if self.bytes_per_s is not None:
            now = time.monotonic()
            # What an idle time left unused is lost but for a piece, or a burst would fill the line.
            self._due = max(self._due, now - _PIECE_S) + moved / self.bytes_per_s
            deadline.pause(self._due - now)
