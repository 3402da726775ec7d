"""Figures of a contestant, and their comparison."""

import os
from pathlib import Path

import msgspec

from benchmarks.peers import of_headway
from benchmarks.peers.figures import Figures, compared, figures_of
from headway.deploy.run.events import StepEvent
from tests.deploy.runs import bare_metrics, open_record
from tests.peers.races import steps_of


def test_first_steps_do_not_count_towards_speeds() -> None:
    one = figures_of(steps_of(50, 60, 61, 62), first=2)
    assert (one.samples_per_s, one.tokens_per_s, one.response_tokens, one.learner_idle) == (4.0, 10.0, 2.5, 0.25)
    assert (one.seconds, one.ends_s) == (62, [50, 60, 61, 62])


def test_headways_files_become_figures(tmp_path: Path) -> None:
    record = open_record(tmp_path)
    for step in range(3):
        values = {"trajectories": 8, "trained_tokens": 40, "reward_mean": 0.5, "take_s": 0.5, "lag_mean": 1.0}
        metrics = bare_metrics(incarnation=1, step=step, time_s=2.0 * (step + 1), step_s=2.0, **values)
        record.write(StepEvent(metrics=metrics, tids=()))
    os.utime(tmp_path / "metrics.jsonl", (1000.0, 1000.0))
    one = of_headway.read_figures(tmp_path, 970.0)
    assert one.ends_s == [26.0, 28.0, 30.0]
    assert (one.samples_per_s, one.tokens_per_s, one.learner_idle, one.lag_mean) == (4.0, 20.0, 0.25, 1.0)


def ran(speed: int, pass_rate: float) -> Figures:
    return msgspec.structs.replace(figures_of(steps_of(1, 2, samples=speed)), pass_rate=pass_rate)


def test_the_median_run_is_compared_with_the_best_setting_of_trl() -> None:
    ours, slow, best = [ran(90, 0.9), ran(30, 0.95), ran(60, 0.93)], [ran(20, 0.99)], [ran(50, 0.95)]
    one = compared({"headway": ours, "trl-1-thread": slow, "trl-all-threads": best})
    assert (one["best_of_peers"], one["times_faster"]) == ("trl-all-threads", 1.2)
    assert list(one["met"].values()) == [False, True]
    assert (one["headway"]["pass_rate"], one["samples_per_s"]["headway"]) == (0.93, [90, 30, 60])
    worse = compared({"headway": [ran(90, 0.8)], "trl-all-threads": best})
    assert list(worse["met"].values()) == [True, False]
    assert "met" not in compared({"headway": ours, "trl-1-thread": []})
