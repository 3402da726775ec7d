"""The moment at which an operation is given up, and a flag that ends the operation sooner."""

import threading
import time

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
