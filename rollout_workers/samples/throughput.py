"""Tokens per second over the last few seconds, for how long there was none, and how long the engine was busy."""

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """Counts tokens in a sliding window."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._window_s = window_s
        self._clock = clock
        self._began = clock()
        self._last_s = self._began
        self._counts: deque[tuple[float, int]] = deque()
        self._running, self._running_since_s = 0, self._began
        self.busy_s = 0.0
        """Seconds with requests."""
        self.slot_s = 0.0
        """The sum of these seconds over all requests."""

    def add(self, count: int) -> None:
        """Count tokens that were sampled now."""
        self.total += count
        self._last_s = self._clock()
        self._counts.append((self._last_s, count))
        self._forget()

    def expect(self) -> None:
        """The engine gets its first request now: silence counts from here."""
        self._last_s = self._clock()

    def run(self, requests: int) -> None:
        """The engine samples so many requests from now on. Callers repeat it now and then while nothing changes."""
        now = self._clock()
        seconds, self._running_since_s = now - self._running_since_s, now
        self.busy_s += seconds if self._running else 0.0
        self.slot_s += seconds * self._running
        self._running = requests

    def silent_s(self) -> float:
        """Return the seconds since the last token, or since `expect`."""
        return self._clock() - self._last_s

    def per_second(self) -> float:
        """Return tokens per second; 0 if none were counted within the window. Any thread may call it: it looks at a
        copy and forgets nothing."""
        horizon = self._clock() - self._window_s
        seconds = min(self._window_s, self._clock() - self._began)
        counted = sum(count for at, count in tuple(self._counts) if at >= horizon)
        return counted / seconds if seconds > 0 else 0.0

    def _forget(self) -> None:
        horizon = self._last_s - self._window_s
        while self._counts and self._counts[0][0] < horizon:
            self._counts.popleft()
