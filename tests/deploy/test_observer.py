"""The learner's observer tells sinks every step, and looks at the workers for them when that is due."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import RunStatus
from headway.deploy.observe.sinks.base import Sinks
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles import observer as observing
from headway.deploy.roles.observer import RunObserver
from headway.deploy.roles.observer import step_event as event_of
from headway.deploy.run.events import Event, HeartbeatEvent, StepEvent
from headway.deploy.run.record import read_last_look
from headway.learner.batching.packing import from_trajectory
from headway.learner.experience.length_drift import length_class
from headway.learner.experience.stream import Experience
from headway.learner.objective.shaping import reward_stats
from headway.learner.objective.update import ScoredBatch, Update
from headway.learner.stages.loop import Stopwatch, TrainedStep
from tests.learner.batches import group

from .runs import run_status, sink_run, step_event

STEPS = 11
"""The number of steps, each of two seconds."""


class Told(JsonlSink):
    """The run's record, which keeps each event that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Event] = []

    def write(self, event: Event) -> None:
        super().write(event)
        self.told.append(event)


class Other(Told):
    """A sink beside the record, which writes no files."""

    is_record = False

    def write(self, event: Event) -> None:
        self.told.append(event)


def experience_of(status: RunStatus | None) -> Any:
    answers = {"status.return_value": status, "waited_s": (0.5, 1.5), "broker_calls.return_value": (3, 0.25)}
    return Mock(spec=Experience, long_prompts=2, **answers)


@pytest.fixture(autouse=True)
def made_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "step_event", lambda step, total, time_s: step_event(step))


def observer_of(sinks: Sinks, experience: Any) -> RunObserver:
    return RunObserver(load_recipe("arithmetic.yaml"), first_step=0, sinks=sinks, experience=experience, evaluator=None)


def train(sink: JsonlSink, experience: Any, directory: Path) -> None:
    """Report the steps as the learner's loop does."""
    observer = observer_of(Sinks({"sink": sink}, sink_run(directory)), experience)
    for step in range(STEPS):
        observer.on_step(step)  # type: ignore[arg-type]


def test_nobody_looks_at_the_workers_for_sinks_that_do_not_want_it(tmp_path: Path) -> None:
    experience, sink = experience_of(run_status()), JsonlSink()
    sink.wants_heartbeats = False
    train(sink, experience, tmp_path)
    assert experience.status.call_count == 0
    assert experience.report.call_count == STEPS
    reported = experience.report.call_args.args[0]
    assert (reported.waited_mean_s, reported.waited_max_s) == (1.0, 1.5)
    assert (reported.broker_calls, reported.broker_s) == (3, 0.25)
    assert reported.long_prompts == 2


def test_the_workers_are_looked_at_now_and_then(tmp_path: Path) -> None:
    sink, status = Told(), run_status()
    train(sink, experience_of(status), tmp_path)
    beats = [event for event in sink.told if isinstance(event, HeartbeatEvent)]
    assert [beat.step for beat in beats] == [0, 5, 10]
    assert {beat.workers for beat in beats} == {status.workers}


def test_a_server_that_has_forgotten_the_run_has_no_workers_to_tell_of(tmp_path: Path) -> None:
    sink = Told()
    train(sink, experience_of(None), tmp_path)
    assert len(sink.told) == STEPS


def test_looks_between_steps_are_told_to_the_sinks_that_want_them(tmp_path: Path) -> None:
    record, other, status = Told(), Other(), run_status()
    with Sinks({"record": record, "other": other}, sink_run(tmp_path)) as sinks:
        observer = observer_of(sinks, experience_of(status))
        observer.on_look(status)
        observer.on_step(0)  # type: ignore[arg-type]
        observer.on_look(status)
    beats = [event for event in other.told if isinstance(event, HeartbeatEvent)]
    assert [(beat.step, beat.workers) for beat in beats] == [(0, status.workers)] * 2, "a step's look is new enough"
    assert len([event for event in record.told if isinstance(event, HeartbeatEvent)]) == 1, "a record has one thread"


def test_the_run_keeps_what_was_seen_last(tmp_path: Path) -> None:
    first, status = run_status(1), run_status()
    with Sinks({"record": JsonlSink()}, sink_run(tmp_path)) as sinks:
        observer = observer_of(sinks, experience_of(first))
        observer.on_step(0)  # type: ignore[arg-type]
        assert read_last_look(tmp_path) == HeartbeatEvent.of(first, step_event(0).metrics)
        observer.on_end(status)
    look = read_last_look(tmp_path)
    assert look is not None
    assert (look.step, look.workers, look.tallies) == (0, status.workers, status.tallies)


def test_the_log_says_once_that_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flat_step(step: Any, *_: object) -> StepEvent:
        made = step_event(step)
        return replace(made, metrics=replace(made.metrics, flat_groups=1.0, grad_norm=0.0 if step != 5 else 0.5))

    monkeypatch.setattr(observing, "step_event", flat_step)
    train(JsonlSink(), experience_of(None), tmp_path)
    told = [record.getMessage() for record in caplog.records if "nothing is trained" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["step 3", "step 9"]


@pytest.mark.parametrize("chosen", [(2, 0), ()])
def test_a_sample_that_was_left_out_counts_as_taken_and_not_as_trained(chosen: tuple[int, ...]) -> None:
    taken, laps = group(0), Stopwatch()
    cut = replace(taken.trajectories[1], finish_reason="length")
    taken = replace(taken, trajectories=(taken.trajectories[0], cut, taken.trajectories[2]))
    for phase in ("checkpoint", "take", "pack", "train", "publish"):
        laps.lap(phase)
    trajectories = tuple(taken.trajectories[index] for index in chosen)
    sequences = tuple(one for each in trajectories for one in from_trajectory(each, advantages=1.0, step=0, max_lag=0))
    figures = {"pairs": len(chosen) // 2, "groups_without_pair": 1 - len(chosen) // 2}
    update = Update(
        loss=0.5,
        grad_norm=1.0,
        learning_rate=0.1,
        micro_batches=1,
        computed_tokens=48,
        budget_tokens=64,
        algorithm={"ess": 1.0},
        by_lag={},
    )
    judged = ScoredBatch(sequences=sequences, trajectories=trajectories, rewards=reward_stats([taken]), figures=figures)
    step = TrainedStep(version=WeightVersion(1, 0), groups=[taken], scored=judged, update=update, laps=laps.laps)
    event = event_of(step, 1, 0.0)
    metrics = event.metrics
    assert metrics.flat_groups == 0
    assert metrics.truncated == pytest.approx(1 / 3)
    assert event.tids == tuple(f"{taken.prompt.group}:0:{index}" for index in chosen)
    assert (metrics.groups, metrics.trajectories, metrics.untrained_trajectories) == (1, len(chosen), 3 - len(chosen))
    assert sum(metrics.lag_histogram.values()) == len(chosen)
    assert metrics.response_length_histogram == Counter(length_class(len(one.response_tokens)) for one in trajectories)
    assert [length_class(tokens) for tokens in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert metrics.trained_tokens == sum(int(one.loss_mask.sum()) for one in trajectories)
    assert metrics.reward_mean == pytest.approx(sum(one.reward for one in taken.trajectories) / 3)
    assert metrics.algorithm == {"ess": 1.0, **figures}
