"""Figures of a contestant, and their comparison."""

import os
import time
from pathlib import Path

import msgspec

from benchmarks.peers import comparison, of_headway
from benchmarks.peers.figures import Figures, Step, figures_of
from benchmarks.peers.gpu_idle import Look, idle, looking
from benchmarks.peers.of_trl import Clock
from headway.deploy.run.events import HeartbeatEvent, StepEvent
from tests.deploy.runs import bare_metrics, open_record, run_status
from tests.peers.races import steps_of, told


def test_first_steps_do_not_count_towards_speeds() -> None:
    one = figures_of(steps_of(50, 60, 61, 62), engine_idle=0.0, pause_per_update_s=None, first=2)
    assert (one.samples_per_s, one.tokens_per_s, one.response_tokens, one.learner_idle) == (4.0, 10.0, 2.5, 0.25)
    assert (one.first_step_s, one.seconds, one.ends_s) == (50, 62, [50, 60, 61, 62])
    assert (one.engine_idle, one.pause_per_update_s) == (0.0, None)


def test_a_synchronous_trainer_pauses_generation_for_all_of_an_update() -> None:
    clock = Clock(time.time())
    clock.steps, clock.generating_s = steps_of(10, 12, 14), [9.0, 0.5, 1.5]
    one = clock.figures(first=1)
    assert (one.engine_idle, one.pause_per_update_s) == (0.5, 1.0)


def test_headways_files_become_figures(tmp_path: Path) -> None:
    record = open_record(tmp_path)
    for step in range(3):
        values = {"trajectories": 8, "response_tokens_mean": 5.0, "reward_mean": 0.5, "take_s": 0.5, "lag_mean": 1.0}
        metrics = bare_metrics(incarnation=1, step=step, time_s=2.0 * (step + 1), step_s=2.0, **values)
        record.write(StepEvent(metrics=metrics, tids=()))
    look = msgspec.structs.replace(run_status(), workers=(told("a", 0.0), told("b", 0.0)))
    record.write(HeartbeatEvent.later(look, step=2, time_s=6.5))
    os.utime(tmp_path / "metrics.jsonl", (1000.0, 1000.0))
    reports = {
        "a": [(996.0, 1.0), (1000.0, 3.0)],
        "b": [(996.0, 0.0), (998.0, 2.0), (1000.0, 4.0)],
        "early": [(990.0, 0.0)],
    }
    one = of_headway.read_figures(tmp_path, 970.0, reports)
    assert one.ends_s == [26.0, 28.0, 30.0]
    assert (one.samples_per_s, one.tokens_per_s, one.learner_idle, one.lag_mean) == (4.0, 20.0, 0.25, 1.0)
    assert (one.engine_idle, one.pause_per_update_s) == (0.25, 0.05)


def ran(speed: int, pass_rate: float) -> Figures:
    one = figures_of(steps_of(1, 2, samples=speed), engine_idle=None, pause_per_update_s=None)
    return msgspec.structs.replace(one, pass_rate=pass_rate)


def test_the_median_run_is_compared_with_the_best_setting_of_trl() -> None:
    ours, slow, best = [ran(90, 0.9), ran(30, 0.95), ran(60, 0.93)], [ran(20, 0.99)], [ran(50, 0.95)]
    rounds = {"headway": ours, "trl-1-thread": slow, "trl-all-threads": best}
    one = comparison.compared(rounds, before=0.3)
    assert (one["best_of_peers"], one["times_faster"], list(one["met"].values())) == (
        "trl-all-threads",
        1.2,
        [False, True, True, True],
    )
    assert (one["headway"]["pass_rate"], one["samples_per_s"]["headway"]) == (0.93, [90, 30, 60])
    worse = comparison.compared({"headway": [ran(90, 0.8)], "trl-all-threads": best}, before=0.3)
    assert list(worse["met"].values()) == [True, False, True, True]
    assert "met" not in comparison.compared({"headway": ours, "trl-1-thread": []}, before=0.3)


def learned(*rewards: float, step_s: float, first_s: float) -> Figures:
    ends = [first_s + step_s * at for at in range(len(rewards))]
    steps = [
        Step(end_s=end, samples=4, tokens=10, reward=reward, learner_idle_s=0.0)
        for end, reward in zip(ends, rewards, strict=True)
    ]
    return figures_of(steps, engine_idle=None, pause_per_update_s=None)


def test_rewards_are_compared_after_equal_samples_and_after_equal_seconds() -> None:
    ours = learned(*[0.1] * 5, *[0.6] * 5, step_s=1, first_s=3)  # its last step ends after 12 seconds
    peer = learned(*[0.1] * 5, *[0.7] * 5, *[0.9] * 5, step_s=2, first_s=4)  # after 12 seconds five steps have ended
    assert comparison.rewards_beside(ours, peer) == {"equal samples": (0.6, 0.7), "equal seconds": (0.6, 0.1)}
    late = learned(0.5, 0.5, step_s=1, first_s=100)
    one = comparison.compared({"headway": [ours], "trl-1-thread": [late]}, before=0.3)
    assert one["reward_of_headway_and_peer"]["trl-1-thread"]["equal seconds"] == (0.6, None)
    assert list(one["met"].values())[-2:] == [False, True]  # 0.1 against 0.5 after two steps; theirs have not ended


def test_idle_time_of_gpus_is_of_the_steps_that_count() -> None:
    seen: list[Look] = [(1.0, [100.0, 100.0]), (5.0, [20.0, 60.0]), (6.0, [40.0, 80.0]), (9.0, [0.0, 0.0])]
    assert idle(seen, 4.0, 8.0) == [0.7, 0.3]
    assert idle([(5.0, [])], 4.0, 8.0) is None  # a machine without nvidia-smi
    with looking(0) as of_none:
        assert of_none == []
