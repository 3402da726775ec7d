"""Times the phases of one step. Metrics and traces of the step are made of the same laps."""

import time
from collections.abc import Iterable
from typing import NamedTuple


class Lap(NamedTuple):
    """One stretch of a step in one phase; the laps of a step follow each other without gaps."""

    phase: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float


class Stopwatch:
    """Measures one step, lap by lap. Its clock never goes back."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self._epoch_s = time.time() - time.perf_counter()
        self._last_s = self._now_s()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        now_s = self._now_s()
        self.laps.append(Lap(phase, self._last_s, now_s))
        self._last_s = now_s

    def _now_s(self) -> float:
        return self._epoch_s + time.perf_counter()


def seconds_by_phase(laps: Iterable[Lap]) -> dict[str, float]:
    """Returns the seconds of each phase, over all its laps."""
    seconds: dict[str, float] = {}
    for lap in laps:
        seconds[lap.phase] = seconds.get(lap.phase, 0.0) + lap.end_s - lap.start_s
    return seconds
