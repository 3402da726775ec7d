"""Compares the contestants' figures: Headway over the fastest peer."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from .figures import Figures, reward_after
from .of_headway import NAME
from .race import LONG_TAILED, SHORT

TARGETS = {(2, SHORT): 2.0, (2, LONG_TAILED): 3.0}
"""The targets by the number of GPUs and the task: so many times the samples per second of the fastest peer."""
TARGET = 1.5
"""The target elsewhere."""
NOISE = 0.04
"""The largest distance between two pass rates that are equal: three standard errors of a difference at 512 prompts, of
which 0.95 are solved."""


def middle(runs: Sequence[Figures]) -> Figures:
    """Return the run whose samples per second are the median, the slower one of the middle two."""
    return sorted(runs, key=lambda run: run.samples_per_s)[(len(runs) - 1) // 2]


def compared(rounds: Mapping[str, Sequence[Figures]], before: float | None, target: float = TARGET) -> dict[str, Any]:
    """Return the last line's object: every contestant's median run, and the comparison as far as both have run.

    `before`: the pass rate of the model from which all started; None if it was not measured.
    """
    runs = {name: middle(of_name) for name, of_name in rounds.items() if of_name}
    found: dict[str, Any] = {"pass_rate_before": before}
    found |= {name: msgspec.to_builtins(run) for name, run in runs.items()}
    found["samples_per_s"] = {name: [run.samples_per_s for run in of_name] for name, of_name in rounds.items()}
    theirs = {name: run for name, run in runs.items() if name != NAME}
    if NAME not in runs or not theirs:
        return found
    speeds = {name: median(run.samples_per_s for run in rounds[name]) for name in runs}
    best = max(theirs, key=lambda name: speeds[name])
    ours, peer = runs[NAME], theirs[best]
    times = round(speeds[NAME] / speeds[best], 2)
    learned = {name: rewards_beside(ours, run) for name, run in theirs.items()}
    met = {
        f"{target} times the samples per second": times >= target,
        **_learned_as_much(ours.pass_rate, peer.pass_rate),
        **{f"reward after {equal} equal or better": _is_level(*pair) for equal, pair in learned[best].items()},
    }
    return {
        **found,
        "best_of_peers": best,
        "times_faster": times,
        "target": target,
        "reward_of_headway_and_peer": learned,
        "met": met,
    }


def _learned_as_much(ours: float | None, peer: float | None) -> dict[str, bool]:
    """Return whether the pass rates are equal or ours is better; nothing unless both were measured."""
    if ours is None or peer is None:
        return {}
    return {"held-out pass rate equal or better": ours >= peer - NOISE}


def rewards_beside(ours: Figures, peer: Figures) -> dict[str, tuple[float | None, float | None]]:
    """Return both runs' rewards, ours first, after as many samples and seconds as the one of fewer has.

    A step's reward is of the samples that it trained. Ours were sampled by weights of up to `max_lag` steps before, so
    after equal samples ours tell of earlier weights; the held-out pass rates, which are of the last ones, do not.
    """
    samples = min(len(run.rewards) * run.samples_per_step for run in (ours, peer))
    seconds = min(run.seconds for run in (ours, peer))
    return {
        "equal samples": (reward_after(ours, samples=samples), reward_after(peer, samples=samples)),
        "equal seconds": (reward_after(ours, seconds=seconds), reward_after(peer, seconds=seconds)),
    }


def _is_level(ours: float | None, peer: float | None) -> bool:
    """Whether the first is not below the second by more than noise. No step in that time is below all."""
    return (ours or 0.0) >= (peer or 0.0) - NOISE
