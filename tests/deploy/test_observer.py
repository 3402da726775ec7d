"""What the learner's observer tells sinks, and when it looks at the workers for them."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from broker.schema import RunStatus
from deploy.observe.sinks.delivery import Sinks
from deploy.observe.sinks.jsonl import JsonlSink
from deploy.recipe.loading import load_recipe
from deploy.roles import observer as observing
from deploy.roles.observer import RunObserver
from deploy.run.events import Event, HeartbeatEvent
from learner.experience.stream import Experience

from .runs import run_status, sink_run, step_event

STEPS = 11
"""Of two seconds each."""


class WithHeartbeats(JsonlSink):
    """The run's record, and what it was told."""

    wants_heartbeats = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Event] = []

    def write(self, event: Event) -> None:
        super().write(event)
        self.told.append(event)


def experience_of(status: RunStatus | None) -> Any:
    return Mock(spec=Experience, **{"status.return_value": status})


def train(sink: JsonlSink, experience: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the learner's loop does, with steps whose figures are made up."""
    monkeypatch.setattr(observing, "step_event", lambda step, total, time_s: step_event(step))
    observer = RunObserver(
        load_recipe("arithmetic.yaml"),
        first_step=0,
        sinks=Sinks({"sink": sink}, sink_run(directory)),
        experience=experience,
        evaluator=None,
    )
    for step in range(STEPS):
        observer.on_step(step)  # type: ignore[arg-type]


def test_nobody_looks_at_the_workers_for_sinks_that_do_not_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experience = experience_of(run_status())
    train(JsonlSink(), experience, tmp_path, monkeypatch)
    assert experience.status.call_count == 0
    assert experience.report.call_count == STEPS


def test_the_workers_are_looked_at_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, status = WithHeartbeats(), run_status()
    train(sink, experience_of(status), tmp_path, monkeypatch)
    beats = [event for event in sink.told if isinstance(event, HeartbeatEvent)]
    assert [beat.step for beat in beats] == [0, 5, 10]
    assert {beat.workers for beat in beats} == {status.workers}


def test_a_server_that_has_forgotten_the_run_has_no_workers_to_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = WithHeartbeats()
    train(sink, experience_of(None), tmp_path, monkeypatch)
    assert len(sink.told) == STEPS
