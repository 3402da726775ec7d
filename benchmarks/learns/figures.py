"""The compared figures of a run, read from the directory that `headway run` left."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.run.record import METRICS, lineage, read_lines, read_summary

from .apart import APART, HELD, POOLS, by_pool
from .parts import ALGORITHMS, CONTROL, SECONDS, SFT

GAIN = 0.15
"""The gain in the held-out pass rate that an algorithm must bring."""
MINUTES = 6
"""The minutes within which it must bring the gain, from the command's start to its end."""
NOISE = 0.08
"""The largest distance between two measurements of one model: three standard errors of a difference at 500 prompts."""


def of_sft(directory: Path) -> dict[str, Any]:
    """Return the figures of a finished warm-up."""
    outcome = json.loads((directory / "sft.json").read_text())
    return {key: outcome[key] for key in ("steps", "loss", "pass_rate")} | {"seconds": seconds_of(directory)}


def of_run(directory: Path) -> dict[str, Any]:
    """Return the figures of a finished run. Pass rates are of held-out prompts; seconds include every start and end."""
    summary, steps = read_summary(directory), lineage(read_lines(directory / METRICS, StepMetrics))
    steady = steps[1:] or steps  # the first waits until engines have started
    before, after = summary["eval_before"], summary["eval_after"]
    return {
        "pass_rate_before": before,
        "pass_rate_after": after,
        "gain": round(after - before, 4),
        "reward_first": summary["reward_first"],
        "reward_last": summary["reward_last"],
        "seconds": seconds_of(directory),
        "training_seconds": round(sum(step.step_s for step in steps), 1),
        "steps": len(steps),
        "samples_per_s": round(sum(step.trajectories for step in steady) / sum(step.step_s for step in steady), 1),
        "step_seconds": {phase: _mean(steady, f"{phase}_s") for phase in ("take", "train", "publish", "step")},
        "response_tokens": [round(step.response_tokens_mean, 1) for step in (steps[0], steps[-1])],
        "max_lag": summary["max_lag_seen"],
        "max_lag_allowed": summary["max_lag_allowed"],
        "lag_mean": _mean(steps, "lag_mean"),
        "trained_twice": summary["trained_twice"],
        "skipped_updates": sum(step.grad_norm is None for step in steps),
        **{name: reported(steps, name) for name in ("clip_fraction", "mask_fraction", "ess")},
    }


def of_apart(directory: Path) -> dict[str, Any]:
    """Return the figures of a finished run whose pools were started apart, with those of each pool."""
    run = of_run(directory)
    held_s = json.loads((directory / HELD).read_text())
    return run | {"held_seconds": held_s, "pools": by_pool(directory, run["steps"])}


def reported(steps: Sequence[StepMetrics], name: str) -> float | None:
    """Return the mean over the steps of the loss's report under that name, or None where there is no such report."""
    values = [step.algorithm[name] for step in steps if name in step.algorithm]
    return float(f"{fmean(values):.4g}") if values else None


def compared(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return GSPO's clip fraction over GRPO's, and whether each target is met, as far as its parts have been run."""
    runs = {part: one for part, one in figures.items() if part != SFT}
    met = {
        f"{part} gains {GAIN} in {MINUTES} minutes": one["gain"] >= GAIN and one["seconds"] <= 60 * MINUTES
        for part, one in runs.items()
        if part in ALGORITHMS
    }
    met |= {f"{part} trains samples of all its pools": _has_all(part, runs[part]) for part in APART if part in runs}
    for part in APART:
        if part in runs and "grpo" in runs:
            met[f"{part} ends as grpo does"] = (
                abs(runs[part]["pass_rate_after"] - runs["grpo"]["pass_rate_after"]) <= NOISE
            )
    if CONTROL in runs:
        met["control stays"] = abs(runs[CONTROL]["gain"]) <= NOISE
    if runs:
        met["lag within its bound"] = all(one["max_lag"] <= one["max_lag_allowed"] for one in runs.values())
        met["nothing trained twice"] = not any(one["trained_twice"] for one in runs.values())
    return {"clip_fraction_gspo_over_grpo": _ratio(runs), "met": met}


def _has_all(part: str, run: Mapping[str, Any]) -> bool:
    return set(run["pools"]) == set(POOLS[part])


def _ratio(runs: Mapping[str, Mapping[str, Any]]) -> float | None:
    grpo, gspo = (runs.get(name, {}).get("clip_fraction") for name in ALGORITHMS)
    return round(gspo / grpo, 1) if grpo and gspo is not None else None


def seconds_of(directory: Path) -> float | None:
    """Return the seconds of the part's command; None for a warm-up from elsewhere or an early stop."""
    file = directory / SECONDS
    return float(json.loads(file.read_text())) if file.exists() else None


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    return round(fmean(getattr(step, name) for step in steps), 3)
