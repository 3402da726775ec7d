"""Every sink keeps one promise: events that a run wrote can be read back, after a resume as well.

test_trackers.py proves it of wandb, MLflow and trackio, whose packages need an environment of their own.
"""

import json
from dataclasses import replace as replace_run
from pathlib import Path
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.sinks import make_sink
from headway.deploy.observe.sinks.base import MetricSink, SinkRun
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.observe.sinks.prometheus import PrometheusSink
from headway.deploy.observe.sinks.trackers import TensorBoardSink, points, step_of
from headway.deploy.recipe.recipe import PrometheusOptions, SinkConfig, TensorBoardOptions
from headway.deploy.run.events import EvaluationEvent, Event, HeartbeatEvent
from headway.deploy.run.record import EVALUATIONS, METRICS, lineage, read_lines
from headway.deploy.run.stage_output import record_of
from tests.deploy.runs import evaluation, run_status, sink_run, stage_event, step_event, step_metrics

from .curves import Figures, curve, curves
from .scrapes import figure, scrape


class Case(Protocol):
    """A sink, and a reader of its output that shares no code with it."""

    shows_history: bool
    """Whether the sink shows all steps; False where it shows only the last one."""

    def sink(self) -> MetricSink: ...
    def look(self, sink: Any) -> None:
        """Read the figures that are gone once the sink is closed."""
        ...

    def rewards(self, directory: Path) -> Figures: ...
    def pass_rates(self, directory: Path) -> Figures: ...
    def workers(self, directory: Path) -> Figures | None:
        """Return the reported figures, or None where the sink keeps no heartbeats."""
        ...

    def of_stage(self, directory: Path, name: str) -> Figures:
        """Return the figures of the stage `2-dpo`."""
        ...


class Files:
    shows_history = True

    def look(self, sink: Any) -> None:
        """There is nothing to read, because the files stay."""


class Jsonl(Files):
    def sink(self) -> MetricSink:
        return JsonlSink()

    def rewards(self, directory: Path) -> Figures:
        return {step.step: step.reward_mean for step in lineage(read_lines(directory / METRICS, StepMetrics))}

    def pass_rates(self, directory: Path) -> Figures:
        lines = map(json.loads, (directory / EVALUATIONS).read_text().splitlines())
        return {line["step"]: line["pass_rate"] for line in lines}

    def workers(self, directory: Path) -> Figures | None:
        return None

    def of_stage(self, directory: Path, name: str) -> Figures:
        lines = map(json.loads, (directory / "stages" / "2-dpo.metrics.jsonl").read_text().splitlines())
        return {line["steps"]: {**line, **line.get("metrics", {})}[name] for line in lines}


class TensorBoard(Files):
    def sink(self) -> MetricSink:
        return TensorBoardSink(TensorBoardOptions())

    def rewards(self, directory: Path) -> Figures:
        return curve(directory / "tensorboard", "step/reward_mean")

    def pass_rates(self, directory: Path) -> Figures:
        return curve(directory / "tensorboard", "evaluation/pass_rate")

    def workers(self, directory: Path) -> Figures | None:
        return curve(directory / "tensorboard", "workers/living")

    def of_stage(self, directory: Path, name: str) -> Figures:
        return curve(directory / "tensorboard" / "2-dpo", f"stage/{name}")


class Prometheus:
    shows_history = False

    def sink(self) -> MetricSink:
        return PrometheusSink(PrometheusOptions(port=0))

    def look(self, sink: Any) -> None:
        self._found = scrape(sink.url)

    def rewards(self, directory: Path) -> Figures:
        return self._last("headway_learner_step", "headway_learner_reward_mean")

    def pass_rates(self, directory: Path) -> Figures:
        return self._last("headway_learner_pass_rate_step", "headway_learner_pass_rate")

    def workers(self, directory: Path) -> Figures | None:
        living = sum(value for (name, _), value in self._found.items() if name == "headway_pool_workers")
        return dict.fromkeys(self.rewards(directory), living)

    def of_stage(self, directory: Path, name: str) -> Figures:
        return self._last("headway_stage_steps", "headway_stage_figure", figure=name)

    def _last(self, steps: str, name: str, **labels: str) -> Figures:
        at, value = figure(self._found, steps), figure(self._found, name, **labels)
        return {} if at is None or value is None else {int(at): value}


class Own(Files):
    """A case for a user's own class, named by an import path."""

    def sink(self) -> MetricSink:
        return make_sink(SinkConfig(kind=f"{__name__}:Notes"), "metrics[1]")

    def rewards(self, directory: Path) -> Figures:
        return self._curve(directory, "step/reward_mean")

    def pass_rates(self, directory: Path) -> Figures:
        return self._curve(directory, "evaluation/pass_rate")

    def workers(self, directory: Path) -> Figures | None:
        return self._curve(directory, "workers/living")

    def of_stage(self, directory: Path, name: str) -> Figures:
        return self._curve(directory, f"2-dpo-stage/{name}")

    def _curve(self, directory: Path, tag: str) -> Figures:
        points: list[tuple[int, str, float]] = []
        for step, name, value in map(json.loads, (directory / "notes.jsonl").read_text().splitlines()):
            if points and step < points[-1][0]:  # the run went back, and trains these steps anew
                points = [point for point in points if point[0] < step]
            points.append((step, name, value))
        return {step: value for step, name, value in points if name == tag}


class Notes:
    """The user's own class that `Own` loads: it appends every point of an event to one file."""

    is_record = False
    wants_heartbeats = True

    def open(self, run: SinkRun) -> None:
        self._path, self._prefix = run.directory / "notes.jsonl", f"{run.stage}-" if run.stage else ""

    def write(self, event: Event) -> None:
        with self._path.open("a") as file:
            file.writelines(
                f"{json.dumps([step_of(event), self._prefix + tag, value])}\n" for tag, value in points(event)
            )

    def close(self) -> None:
        """There is nothing to free."""


@pytest.fixture(params=[Jsonl, TensorBoard, Prometheus, Own])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param()
    return made


def write(case: Case, directory: Path, *events: Event, stage: str = "") -> None:
    """Write the events of one learner, or of one stage, from its start to its end."""
    sink, record = case.sink(), record_of(directory / "stages" / stage)
    sink.open(replace_run(sink_run(directory), stage=stage, record=record))
    for event in events:
        sink.write(event)
    case.look(sink)
    sink.close()


def shown(case: Case, curve: Figures) -> Figures:
    """Return the part of a curve that the sink shows."""
    return curve if case.shows_history else dict(list(curve.items())[-1:])


def heartbeat(step: int) -> HeartbeatEvent:
    return HeartbeatEvent.of(run_status(), step_metrics(step))


def test_what_was_written_is_read_back(case: Case, tmp_path: Path) -> None:
    events = [step_event(step, ["a:0:0"], reward=step / 4) for step in range(3)]
    write(case, tmp_path, evaluation(1, 0, 0.25), *events, heartbeat(2), evaluation(1, 3, 0.5))
    assert case.rewards(tmp_path) == shown(case, {0: 0.0, 1: 0.25, 2: 0.5})
    assert case.pass_rates(tmp_path) == shown(case, {0: 0.25, 3: 0.5})
    assert case.workers(tmp_path) in (None, {2: 2.0})


def test_a_resumed_run_shows_the_steps_of_its_lineage(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path, *(step_event(step, reward=0.25) for step in range(4)))
    write(case, tmp_path, *(step_event(step, incarnation=2, reward=0.75) for step in range(2, 3)))
    assert case.rewards(tmp_path) == shown(case, {0: 0.25, 1: 0.25, 2: 0.75})


def test_a_stage_has_curves_of_its_own_also_where_it_goes_on(case: Case, tmp_path: Path) -> None:
    steps = [stage_event(step, metrics={"held_out/loss": step / 8, "norm": None}) for step in range(1, 5)]
    write(case, tmp_path, *steps, stage="2-dpo")
    write(case, tmp_path, stage_event(3, loss=None, metrics={"held_out/loss": 0.25}), stage="2-dpo")
    losses = {step: loss for step, loss in case.of_stage(tmp_path, "loss").items() if loss}
    assert losses == ({1: 1, 2: 0.5} if case.shows_history else {})
    assert case.of_stage(tmp_path, "held_out/loss") == shown(case, {1: 0.125, 2: 0.25, 3: 0.25})


def test_a_step_whose_update_was_skipped_is_written(case: Case, tmp_path: Path) -> None:
    event = step_event(0)
    write(case, tmp_path, replace(event, metrics=replace(event.metrics, loss=None, grad_norm=None)))
    assert case.rewards(tmp_path) == {0: 0.5}


def test_a_sink_that_was_told_nothing_leaves_nothing(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_a_heartbeat_says_what_the_status_says() -> None:
    status = run_status()
    event = heartbeat(7)
    assert (event.step, event.incarnation, event.time_s) == (7, 1, 16.0)
    assert (event.workers, event.queues) == (status.workers, status.queues)


def test_an_evaluation_is_a_line_of_its_file(tmp_path: Path) -> None:
    write(Jsonl(), tmp_path, evaluation(1, 3, 0.5))
    assert (tmp_path / EVALUATIONS).read_text() == '{"incarnation":1,"step":3,"pass_rate":0.5}\n'
    assert read_lines(tmp_path / EVALUATIONS, EvaluationEvent) == [evaluation(1, 3, 0.5)]


def test_curves_are_of_every_figure_that_is_one(tmp_path: Path) -> None:
    write(TensorBoard(), tmp_path, step_event(0), heartbeat(0))
    found = curves(tmp_path / "tensorboard")
    metrics = step_metrics(0)
    numbers = {name for name in metrics.__struct_fields__ if isinstance(getattr(metrics, name), (int, float))}
    tags = set(found.Tags()["scalars"])
    assert {tag for tag in tags if tag.startswith("step/")} == {
        f"step/{name}"
        for name in {*numbers, "trained_tokens_per_s", "wait_fraction"} - {"incarnation", "step", "total_steps"}
    }
    values = {tag: found.Scalars(tag)[0].value for tag in tags}
    assert values["algorithm/ess"] == pytest.approx(0.9)
    assert (values["reward/score"], values["reward/score/exact"], values["reward_samples/score"]) == (0.5, 0.25, 24)
    assert (values["by_lag/ess_1"], values["by_lag/tokens_2"]) == (pytest.approx(0.9), 500)
    assert "by_lag/mask_fraction_1" not in values
    assert (values["step/trained_tokens_per_s"], values["step/wait_fraction"]) == (2000.0, 0.25)
    assert (values["workers/generated_tokens_per_s"], values["queues/ready"]) == (5000.0, 12.0)


def test_runs_share_a_directory_of_curves(tmp_path: Path) -> None:
    sink = TensorBoardSink(TensorBoardOptions(directory=str(tmp_path / "all")))
    sink.open(sink_run(tmp_path / "run"))
    sink.write(step_event(0, reward=0.25))
    assert curve(tmp_path / "all" / "arithmetic", "step/reward_mean") == {0: 0.25}, "they are there before it ends"
    sink.close()
