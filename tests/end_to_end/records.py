"""A run's figures, computed anew from trained.jsonl and metrics.jsonl in its directory."""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]

SUMMARY_KEYS = {
    "reward_first",
    "reward_last",
    "eval_before",
    "eval_after",
    "steps",
    "wall_s",
    "trained_trajectories",
    "trained_twice",
    "untrained_trajectories",
    "dropped_stale",
    "mixed_version_trajectories",
    "max_lag_allowed",
    "max_lag_seen",
    "generated_tokens",
    "generation_tokens_per_s",
    "trained_tokens",
    "trained_tokens_per_s",
    "learner_wait_fraction",
    "weight_versions",
    "publish_s_p50",
    "worker_restarts",
    "unreadable_lines",
}


def lines(path: Path) -> list[Line]:
    """Return the lines as they were written, abandoned branches included."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(run: Path) -> Line:
    content: Line = json.loads((run / "summary.json").read_text())
    return content


def lineage(path: Path) -> list[Line]:
    """Return the steps behind the final weights. A learner that resumes may stop before it has repeated all steps."""
    last: dict[int, Line] = {}
    incarnation = 0
    for line in lines(path):
        if line["incarnation"] > incarnation:
            last = {step: earlier for step, earlier in last.items() if step < line["step"]}
            incarnation = line["incarnation"]
        last[line["step"]] = line
    return [last[step] for step in sorted(last)]


def check_trained(run: Path, *, steps: int, trajectories_per_step: int, max_lag: int) -> None:
    """Assert that every step was trained, no trajectory twice, none above the bound, and that summary.json agrees."""
    trained = lineage(run / "trained.jsonl")
    assert [line["step"] for line in trained] == list(range(steps))
    assert {len(line["tids"]) for line in trained} == {trajectories_per_step}
    tids = [tid for line in trained for tid in line["tids"]]
    assert len(set(tids)) == len(tids)
    lags = [line["step"] - line["oldest_step"] for line in trained]
    assert min(lags) >= 0
    assert max(lags) <= max_lag
    found = summary(run)
    assert found.keys() >= SUMMARY_KEYS
    assert found["trained_twice"] == 0
    assert found["steps"] == steps
    assert found["trained_trajectories"] == len(tids)
    assert found["max_lag_seen"] == max(lags)
    assert found["max_lag_allowed"] == max_lag
    assert found["generated_tokens"] > 0
