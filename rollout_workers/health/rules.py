"""The rules by which a worker is set aside: figures in, a verdict out.

stalled   the engine has requests, and has sampled nothing for `stall_s` seconds
failing   the engine has raised errors, or sent impossible output, `errors` times within ERRORS_WITHIN_S
weights   the engine does not hold or compute what was published (its fingerprints and its probe)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Rule = Literal["stalled", "failing", "weights"]

ERRORS_WITHIN_S = 600.0
"""Errors of an engine count for so long. A sample that an engine cannot generate comes again within this time."""


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
