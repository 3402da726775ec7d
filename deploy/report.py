"""What a run leaves behind: metrics.jsonl, trained.jsonl, evaluations.jsonl, summary.json and a plot.

A killed and resumed learner repeats steps since its checkpoint, so the files hold abandoned lines too:
`lineage` keeps the ones whose training is part of the final weights, and every figure is computed from those.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import msgspec

from broker.schema import StepMetrics

METRICS, TRAINED, EVALUATIONS, SUMMARY = "metrics.jsonl", "trained.jsonl", "evaluations.jsonl", "summary.json"
EDGE_STEPS = 3
"""`reward_first` and `reward_last` are means of so many steps."""


class TrainedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of trained.jsonl: what one step trained."""

    incarnation: int
    step: int
    tids: tuple[str, ...]
    oldest_step: int
    """The step of the oldest weights that sampled a token trained here."""


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of evaluations.jsonl: a pass rate on held-out prompts, measured before `step` was trained."""

    incarnation: int
    step: int
    pass_rate: float


Line = TypeVar("Line", StepMetrics, TrainedLine, EvaluationLine)


class RunWriter:
    """Appends lines to a run's files. Only the learner writes; a resumed one goes on where the old ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TRAINED, EVALUATIONS):
            _cut_torn_line(directory / name)

    def write_step(self, metrics: StepMetrics) -> None:
        """One line of metrics.jsonl."""
        _append(self._directory / METRICS, metrics)

    def write_trained(self, incarnation: int, step: int, tids: Iterable[object], oldest_step: int) -> None:
        """One line of trained.jsonl; write it once the step is done. Tids become `group:round:sample`."""
        names = tuple(str(tid) for tid in tids)
        _append(
            self._directory / TRAINED,
            TrainedLine(incarnation=incarnation, step=step, tids=names, oldest_step=oldest_step),
        )

    def write_evaluation(self, incarnation: int, step: int, pass_rate: float) -> None:
        """One line of evaluations.jsonl: the first of a run becomes eval_before, the last eval_after."""
        _append(
            self._directory / EVALUATIONS,
            EvaluationLine(incarnation=incarnation, step=step, pass_rate=pass_rate),
        )


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """The file's whole lines; none if there is no file. A last line torn by a crash is left out."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=kind) for line in whole.splitlines() if line.strip()]


def lineage(lines: Sequence[Line]) -> list[Line]:
    """The lines that lead to the last weights, in order.

    An incarnation forks where it logs its first step: it replaces what earlier ones logged from that step on.
    """
    kept: list[Line] = []
    incarnation = None
    for line in sorted(lines, key=lambda line: line.incarnation):
        if line.incarnation != incarnation:
            kept = [earlier for earlier in kept if earlier.step < line.step]
            incarnation = line.incarnation
        kept.append(line)
    return kept


def count_trained_twice(lines: Sequence[TrainedLine]) -> int:
    """How many trajectories within one lineage were trained again; every time counts. 0 is the promise."""
    counts = Counter(tid for line in lineage(lines) for tid in line.tids)
    return sum(count - 1 for count in counts.values())


def max_lag_seen(lines: Sequence[TrainedLine]) -> int:
    """The largest lag of any token trained in the lineage."""
    return max((line.step - line.oldest_step for line in lineage(lines)), default=0)


def summarize(directory: Path, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write summary.json from the files and what only the caller knows (`extras` wins), and return it.

    Expected in extras: max_lag_allowed, dropped_stale, generated_tokens; worker_restarts where counted.
    """
    all_steps = read_lines(directory / METRICS, StepMetrics)
    trained = read_lines(directory / TRAINED, TrainedLine)
    summary = {
        **_unknown(),
        **_learning(lineage(all_steps)),
        **_evaluations(read_lines(directory / EVALUATIONS, EvaluationLine)),
        **_costs(all_steps),
        "trained_trajectories": sum(len(line.tids) for line in lineage(trained)),
        "trained_twice": count_trained_twice(trained),
        "max_lag_seen": max_lag_seen(trained),
    }
    return _write_summary(directory, _with(summary, extras or {}))


def amend_summary(directory: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Add what the supervisor knows to summary.json, and return it."""
    return _write_summary(directory, _with(read_summary(directory), changes))


def read_summary(directory: Path) -> dict[str, Any]:
    """summary.json; empty if the run never got so far."""
    path = directory / SUMMARY
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return summary


def _unknown() -> dict[str, Any]:
    """Keys that stay at these values unless `extras` says more."""
    return {
        "eval_before": None,
        "eval_after": None,
        "dropped_stale": 0,
        "max_lag_allowed": None,
        "generated_tokens": 0,
        "worker_restarts": 0,
    }


def _learning(steps: Sequence[StepMetrics]) -> dict[str, Any]:
    rewards = [step.reward_mean for step in steps]
    return {
        "reward_first": fmean(rewards[:EDGE_STEPS]) if rewards else None,
        "reward_last": fmean(rewards[-EDGE_STEPS:]) if rewards else None,
        "steps": len(steps),
        "weight_versions": len(steps) + 1,
        "mixed_version_trajectories": sum(step.mixed_version_trajectories for step in steps),
        "trained_tokens": sum(step.trained_tokens for step in steps),
    }


def _costs(steps: Sequence[StepMetrics]) -> dict[str, Any]:
    """Of all the work that was done, abandoned steps too: time does not come back."""
    seconds = sum(step.step_s for step in steps)
    return {
        "wall_s": _wall_s(steps),
        "trained_tokens_per_s": sum(step.trained_tokens for step in steps) / seconds if seconds else 0.0,
        "learner_wait_fraction": sum(step.take_s for step in steps) / seconds if seconds else 0.0,
        "publish_s_p50": median(step.publish_s for step in steps) if steps else 0.0,
    }


def _wall_s(steps: Sequence[StepMetrics]) -> float:
    """The sum over incarnations: each counts its own time from 0."""
    longest: dict[int, float] = {}
    for step in steps:
        longest[step.incarnation] = max(step.time_s, longest.get(step.incarnation, 0.0))
    return sum(longest.values())


def _evaluations(lines: Sequence[EvaluationLine]) -> dict[str, Any]:
    kept = lineage(lines)
    found: dict[str, Any] = {}
    if kept:
        found["eval_before"] = kept[0].pass_rate
    if len(kept) > 1:
        found["eval_after"] = kept[-1].pass_rate
    return found


def _with(summary: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` wins, except that None says nothing."""
    merged = {**summary, **{key: value for key, value in changes.items() if value is not None}}
    wall_s = merged.get("wall_s") or 0.0
    rate = merged.get("generated_tokens", 0) / wall_s if wall_s else 0.0
    return {**merged, "generation_tokens_per_s": changes.get("generation_tokens_per_s", rate)}


def _write_summary(directory: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Whole or not at all."""
    part = directory / f"{SUMMARY}.part"
    part.write_text(json.dumps(summary, indent=2) + "\n")
    part.replace(directory / SUMMARY)
    return summary


def _append(path: Path, line: msgspec.Struct) -> None:
    """In one write, so that a crash tears at most the last line."""
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
