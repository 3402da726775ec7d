"""The rules by which a worker is unhealthy, and is set aside: figures in, a verdict with its reason out.

stalled   the engine has requests, and has sampled nothing for `stall_s` seconds
failing   the engine has raised errors, or sent impossible output, `errors` times within ERRORS_WITHIN_S
weights   the engine does not hold or compute what was published (its fingerprints and its probe)
silent    the worker has reported before, and not for `stall_s` seconds, though its process runs
slow      the worker generates less than `factor` of the median of its pool, both in tokens per second and in tokens
          per second and request

Only busy time counts for `slow`: not that of a start, a swap, or of an engine without requests. An engine with few
requests is slower in all, and one with many is slower for each: so both figures must be low. All workers of a pool have
one kind of engine.

`EngineHealth` collects a worker's figures of its own engine. The worker itself is alive when its engine hangs: without
these figures it would renew the leases of its samples for ever while the learner waits for them. Its supervisor
collects the figures of `slow` and `silent` (`deploy/launch/pool_reports.py`). `RunEnd` says when its run is over.

The invariant: a worker is judged by itself or by its own supervisor, never by another worker. So a process with a
worker's password can have no process set aside but itself.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Rule = Literal["stalled", "failing", "weights", "silent", "slow"]

ERRORS_WITHIN_S = 600.0
"""Errors of an engine count for so long. A sample that an engine cannot generate comes again within this time."""
LEAST_COMPARED = 3
"""Workers without which there is no comparison: of two, the rule cannot say which one is slow."""
LEAST_BUSY = 0.5
"""The share of the window in which a worker must have been busy to be judged."""
LEAST_BUSY_OTHERS = 0.05
"""The share of the window in which others must have been busy. They may have nothing to do but wait for the slow
one."""


@dataclass(frozen=True)
class Verdict:
    """A worker is set aside."""

    rule: Rule
    reason: str
    """The figure, its limit, and what the limit's key is."""


def stalled(requests: int, silent_s: float, stall_s: float) -> Verdict | None:
    """Judge an engine that has `requests` and has sampled nothing for `silent_s`."""
    if not requests or silent_s <= stall_s:
        return None
    return Verdict(
        "stalled",
        f"the engine has {requests} request{'s' * (requests != 1)} and has sampled nothing for {stall_s:g} s"
        " (workers.stall_s)",
    )


def failing(failed_s: Sequence[float], now_s: float, errors: int, last: str) -> Verdict | None:
    """Judge an engine whose requests failed at these times; `last`: the last error."""
    count = sum(now_s - at <= ERRORS_WITHIN_S for at in failed_s)
    if count < errors:
        return None
    return Verdict(
        "failing",
        f"the engine failed {count} time{'s' * (count != 1)} within {ERRORS_WITHIN_S:g} s, and"
        f" {errors} set{'s' * (errors == 1)} a worker aside (workers.engine_errors); the last time: {last}",
    )


def silent(unheard_s: float, stall_s: float) -> Verdict | None:
    """Judge a worker whose process runs and which has not reported for `unheard_s`."""
    if not stall_s or unheard_s <= stall_s:
        return None
    return Verdict("silent", f"its process runs, and has reported nothing for {stall_s:g} s (workers.stall_s)")


@dataclass(frozen=True)
class GenerationRate:
    """The tokens that a worker has generated within a window."""

    tokens: int
    busy_s: float
    """Seconds with requests."""
    slot_s: float
    """The sum of these seconds over all requests."""

    @property
    def per_second(self) -> float:
        """Tokens per busy second."""
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def per_slot(self) -> float:
        """Tokens per busy second and request."""
        return self.tokens / self.slot_s if self.slot_s else 0.0


def slowest(rates: Mapping[str, GenerationRate], window_s: float, factor: float) -> tuple[str, Verdict] | None:
    """Return the slowest worker of a pool with the verdict on it, or None if none is slow. `rates`: by worker, over a
    window of `window_s`."""
    compared = {name: rate for name, rate in rates.items() if rate.busy_s >= LEAST_BUSY_OTHERS * window_s}
    judged = {name: rate for name, rate in compared.items() if rate.busy_s >= LEAST_BUSY * window_s}
    if len(compared) < LEAST_COMPARED or not judged:
        return None
    per_second = statistics.median(rate.per_second for rate in compared.values())
    per_slot = statistics.median(rate.per_slot for rate in compared.values())
    name, rate = min(judged.items(), key=lambda item: item[1].per_slot)
    if rate.per_slot >= factor * per_slot or rate.per_second >= factor * per_second:
        return None
    return name, Verdict(
        "slow",
        f"it generates {rate.per_slot:.3g} tokens/s and request, {rate.per_slot / per_slot:.0%} of the median"
        f" {per_slot:.3g} of the {len(compared)} busy workers of its pool, and {rate.per_second:.3g} tokens/s in all,"
        f" where their median is {per_second:.3g}; less than {factor:.0%} of both over {window_s:g} s sets a worker"
        " aside (workers.slow_factor, workers.slow_window_s)",
    )


class EngineHealth:
    """Counts errors, and looks in which the engine had requests and sampled nothing.

    It counts looks instead of time: a worker process that was stopped has not looked meanwhile.
    """

    def __init__(
        self, *, look_s: float, stall_s: float, errors: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`look_s`: about the seconds between two looks. `stall_s` and `errors`: the limits; 0: none."""
        self._look_s, self._stall_s, self._errors, self._clock = look_s, stall_s, errors, clock
        self._looks = 0
        self._tokens: int | None = None
        self._failed_s = deque[float](maxlen=max(1, errors))
        self.last_error = ""

    def check(self, requests: int, tokens: int) -> Verdict | None:
        """Compare with the last look. `requests`: those for which the engine may sample; `tokens`: all that it has
        sampled until now. Requests that the last look did not see may have come just now, and begin the count."""
        if not requests or tokens != self._tokens:
            self._looks, self._tokens = 0, tokens if requests else None
            return None
        self._looks += 1
        return stalled(requests, self._looks * self._look_s, self._stall_s) if self._stall_s else None

    def failed(self, error: Exception) -> Verdict | None:
        """Count an error of the engine."""
        text = str(error) or "it gave no reason"
        self.last_error = f"the engine failed: {type(error).__name__}: {text}"
        now_s = self._clock()
        self._failed_s.append(now_s)
        return failing(tuple(self._failed_s), now_s, self._errors, f"{type(error).__name__}: {text}")


RUN_OVER = ("finished", "stopped")


class RunEnd:
    """Tracks what the broker says of the run's state. A worker may arrive before the learner that resumes an ended
    run."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: seconds that a worker which finds its run ended waits for a learner to resume it."""
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._saw_run_alive = False

    def is_over(self, state: str) -> bool:
        """Return whether the worker should end. `state` is the broker's answer; "absent" decides nothing."""
        if state in RUN_OVER:
            return self._saw_run_alive or time.monotonic() - self._began > self._patience_s
        self._saw_run_alive = self._saw_run_alive or state != "absent"
        return False
