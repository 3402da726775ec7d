"""Says when each measurement is likely to run, and what will not fit, by the schedule's own rules."""

import shlex
from collections.abc import Sequence

from .measurement import WHOLE, Machine, Measurement
from .schedule import Running, Schedule


class Plan(Schedule):
    """A schedule in which each measurement takes the seconds that it is likely to take; nothing is run."""

    def __init__(self, measurements: Sequence[Measurement], machine: Machine) -> None:
        super().__init__(measurements, machine, lambda words: None)
        self.at = 0.0
        """Seconds since the beginning."""
        self.begun: list[Running] = []
        """In the order in which they begin."""

    def _now(self) -> float:
        return self.at

    def _pause(self) -> None:
        self.at = min(map(_likely_end, self._running))

    def _begin(self, one: Running) -> None:
        self.begun.append(one)

    def _is_over(self, one: Running) -> bool:
        one.code = 0
        return _likely_end(one) <= self.at

    def _has_kept(self, one: Measurement) -> bool:
        return True

    def told(self) -> list[str]:
        """Return a line for each, in the order in which they begin, and then for those that do not fit."""
        lines = [
            f"{one.began:5.0f} to {_likely_end(one):4.0f} s on {_gpus(one):8} {_words(one.of)}" for one in self.begun
        ]
        lines += [f"does not fit               {_words(one)}" for one in self._waiting]
        whole = sum((_likely_end(one) - one.began) * len(one.gpus) * one.of.quarters for one in self.begun)
        share = whole / (WHOLE * len(self._free) * self.at) if self.at else 0.0
        return [*lines, f"all GPUs together are likely to be in use for {share:.0%} of {self.at:.0f} s"]


def _gpus(one: Running) -> str:
    return ",".join(one.gpus) + (f" {one.of.quarters}/{WHOLE}" if one.of.quarters < WHOLE else "")


def _words(one: Measurement) -> str:
    return f"{one.name} ({one.likely_s} s, at most {one.seconds}): {one.python or 'python'} {shlex.join(one.command)}"


def _likely_end(one: Running) -> float:
    return min(one.began + one.of.likely_s, one.until)
