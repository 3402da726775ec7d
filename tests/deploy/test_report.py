"""The lineage of a run that was killed and resumed, and the figures computed from it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.run.figures import moving_average, trained_per_s_on_average
from headway.deploy.run.record import (
    METRICS,
    TRAINED,
    TrainedLine,
    amend_summary,
    count_trained_twice,
    lineage,
    max_lag_seen,
    plot,
    read_lines,
    read_summary,
    summarize,
)
from tests.end_to_end.records import SUMMARY_KEYS

from .runs import open_record, step_event, step_metrics, write_resumed_run


def line(incarnation: int, step: int, *tids: str, oldest: int | None = None) -> TrainedLine:
    return TrainedLine(incarnation=incarnation, step=step, tids=tids, oldest_step=step if oldest is None else oldest)


def test_lineage_of_one_incarnation_is_everything() -> None:
    lines = [line(1, 0, "a"), line(1, 1, "b")]
    assert lineage(lines) == lines


def test_a_later_incarnation_replaces_the_steps_from_its_fork_on() -> None:
    lines = [
        line(1, 0, "a"),
        line(1, 1, "b"),
        line(1, 2, "c"),
        line(2, 1, "b"),
        line(2, 2, "c"),
        line(3, 2, "c"),
    ]
    assert [(kept.incarnation, kept.step) for kept in lineage(lines)] == [(1, 0), (2, 1), (3, 2)]
    assert count_trained_twice(lines) == 0


def test_an_incarnation_that_logged_nothing_more_than_the_fork_drops_what_followed() -> None:
    lines = [line(1, step, f"t{step}") for step in range(5)] + [line(4, 2, "t2")]
    assert [(kept.incarnation, kept.step) for kept in lineage(lines)] == [(1, 0), (1, 1), (4, 2)]


def test_trained_twice_counts_every_repetition_within_the_lineage() -> None:
    assert count_trained_twice([line(1, 0, "a", "b"), line(1, 1, "b", "c"), line(2, 2, "b", "d")]) == 2
    assert count_trained_twice([line(1, 0, "a"), line(1, 0, "a")]) == 1
    assert count_trained_twice([]) == 0


def test_max_lag_is_of_the_lineage_only() -> None:
    assert max_lag_seen([line(1, 5, "a", oldest=4), line(1, 6, "b", oldest=3), line(2, 6, "b", oldest=5)]) == 1
    assert max_lag_seen([]) == 0


def test_the_writer_survives_a_torn_line(tmp_path: Path) -> None:
    open_record(tmp_path, "0123456789abcdef").write(step_event(4, ["0000-00000000:0:1"]))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"incarnation": 1, "ste')
    assert read_lines(tmp_path / METRICS, StepMetrics) == [step_metrics(4)]
    open_record(tmp_path).write(step_event(5))
    assert read_lines(tmp_path / METRICS, StepMetrics) == [step_metrics(4), step_metrics(5)]
    assert json.loads((tmp_path / TRAINED).read_text().splitlines()[0]) == {
        "identity": "0123456789abcdef",
        "incarnation": 1,
        "step": 4,
        "tids": ["0000-00000000:0:1"],
        "oldest_step": 2,
    }


def test_the_summary_holds_every_key_and_counts_the_lineage(tmp_path: Path) -> None:
    write_resumed_run(tmp_path)
    summary = summarize(tmp_path, {"max_lag_allowed": 2, "generated_tokens": 1200, "dropped_stale": 3})
    assert set(summary) == SUMMARY_KEYS
    assert read_summary(tmp_path) == summary
    assert (summary["eval_before"], summary["eval_after"]) == (0.25, 0.875)
    assert (summary["steps"], summary["weight_versions"], summary["trained_trajectories"]) == (5, 6, 5)
    assert (summary["trained_twice"], summary["max_lag_seen"], summary["dropped_stale"]) == (0, 2, 3)
    assert summary["reward_first"] == pytest.approx((0 + 0.25 + 0.5) / 3)
    assert summary["reward_last"] == pytest.approx((0.5 + 0.75 + 1) / 3)
    assert summary["wall_s"] == pytest.approx(4 * 2.0 + 5 * 2.0)  # each incarnation's last time_s
    assert summary["generation_tokens_per_s"] == pytest.approx(1200 / 18.0)
    assert summary["learner_wait_fraction"] == pytest.approx(0.25)


def test_amending_keeps_the_rest(tmp_path: Path) -> None:
    write_resumed_run(tmp_path)
    before = summarize(tmp_path, {"max_lag_allowed": 2})
    after = amend_summary(tmp_path, {"worker_restarts": 2, "generated_tokens": 180})
    assert after == {**before, "worker_restarts": 2, "generated_tokens": 180, "generation_tokens_per_s": 10.0}


def test_the_summary_of_a_run_without_a_step(tmp_path: Path) -> None:
    open_record(tmp_path)
    summary = summarize(tmp_path)
    assert set(summary) == SUMMARY_KEYS
    assert summary["reward_first"] is None
    assert summary["steps"] == 0


@pytest.mark.parametrize("is_empty", [True, False])
def test_the_plot_is_a_picture(tmp_path: Path, is_empty: bool) -> None:
    if not is_empty:
        write_resumed_run(tmp_path)
    path = plot(tmp_path, max_lag=2)
    assert path is not None
    assert path == tmp_path / "plots" / "reward_lag.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_moving_average() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_average([None, 3.0, None, None, 7.0], window=2) == [None, 3.0, 3.0, None, 7.0]


def test_a_mean_pace_counts_the_tokens_and_seconds_of_its_steps_together() -> None:
    fast = msgspec.structs.replace(step_metrics(0), step_s=1.0, trained_tokens=1000)
    slow = msgspec.structs.replace(step_metrics(1), step_s=9.0, trained_tokens=1000)
    assert trained_per_s_on_average([fast, slow, slow], window=2) == pytest.approx([1000, 200, 1000 / 9])


def test_the_summary_has_the_comparison_of_the_first_batch_that_had_one(tmp_path: Path) -> None:
    plain = step_metrics(0)
    names = ("agreement_mean", "agreement_worst", "agreement_tokens")
    compared = [dict(zip(names, numbers, strict=True)) for numbers in ((0.01, 0.2, 40.0), (0.5, 0.6, 8.0))]
    lines = [plain, *(msgspec.structs.replace(plain, algorithm={"ess": 0.9, **each}) for each in compared)]
    lines = [msgspec.structs.replace(line, step=number) for number, line in enumerate(lines)]
    (tmp_path / METRICS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    summary = summarize(tmp_path)
    assert {name: summary[name] for name in names} == compared[0]
    (tmp_path / METRICS).write_bytes(msgspec.json.encode(plain) + b"\n")
    assert not [name for name in summarize(tmp_path) if name.startswith("agreement_")]


def test_the_summary_is_what_a_fold_over_metrics_says(tmp_path: Path) -> None:
    write_resumed_run(tmp_path)
    summary = summarize(tmp_path)
    last: dict[int, dict[str, Any]] = {}
    elapsed: dict[int, float] = {}
    tokens = seconds = waited = 0.0
    for line in map(json.loads, (tmp_path / METRICS).read_text().splitlines()):
        last[line["step"]] = line  # a resumed learner writes a step anew
        elapsed[line["incarnation"]] = line["time_s"]
        tokens, seconds, waited = tokens + line["trained_tokens"], seconds + line["step_s"], waited + line["take_s"]
    assert summary["steps"] == len(last) == 5
    assert summary["trained_tokens"] == sum(line["trained_tokens"] for line in last.values())
    assert summary["mixed_version_trajectories"] == sum(line["mixed_version_trajectories"] for line in last.values())
    assert summary["untrained_trajectories"] == sum(line["untrained_trajectories"] for line in last.values())
    assert summary["max_lag_seen"] == max(line["lag_max"] for line in last.values())
    assert summary["wall_s"] == pytest.approx(sum(elapsed.values()))
    assert summary["trained_tokens_per_s"] == pytest.approx(tokens / seconds)
    assert summary["learner_wait_fraction"] == pytest.approx(waited / seconds)
    rewards = [last[step]["reward_mean"] for step in sorted(last)]
    assert [summary["reward_first"], summary["reward_last"]] == pytest.approx(
        [sum(rewards[:3]) / 3, sum(rewards[2:]) / 3]
    )
