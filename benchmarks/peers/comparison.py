"""Compares the contestants' figures: Headway over the setting of TRL that suited TRL best."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from .figures import Figures
from .of_headway import NAME

TARGET = 1.5
"""The target: so many times the samples per second of the better setting of TRL."""
NOISE = 0.04
"""The largest distance between two pass rates that are equal: three standard errors of a difference at 512 prompts, of
which 0.95 are solved."""


def middle(runs: Sequence[Figures]) -> Figures:
    """Return the run whose samples per second are the median, the slower one of the middle two."""
    return sorted(runs, key=lambda run: run.samples_per_s)[(len(runs) - 1) // 2]


def compared(rounds: Mapping[str, Sequence[Figures]], before: float) -> dict[str, Any]:
    """Return the last line's object: every contestant's median run, and the comparison as far as both have run.

    `before`: the pass rate of the model from which all started.
    """
    runs = {name: middle(of_name) for name, of_name in rounds.items() if of_name}
    found: dict[str, Any] = {"pass_rate_before": before}
    found |= {name: msgspec.to_builtins(run) for name, run in runs.items()}
    found["samples_per_s"] = {name: [run.samples_per_s for run in of_name] for name, of_name in rounds.items()}
    theirs = {name: run for name, run in runs.items() if name != NAME}
    if NAME not in runs or not theirs:
        return found
    best = max(theirs, key=lambda name: theirs[name].samples_per_s)
    ours, peer = runs[NAME], theirs[best]
    times = round(median(run.samples_per_s for run in rounds[NAME]) / peer.samples_per_s, 2)
    met = {
        f"{TARGET} times the samples per second": times >= TARGET,
        "held-out pass rate equal or better": (ours.pass_rate or 0.0) >= (peer.pass_rate or 0.0) - NOISE,
    }
    return {**found, "best_of_trl": best, "times_faster": times, "target": TARGET, "met": met}
