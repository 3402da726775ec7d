"""The sinks that draw curves: TensorBoard, Weights & Biases, MLflow and trackio. Each gets the points of an event: a
step's figures, pass rates and the pool of workers, all over learner steps; or a stage's figures over its own steps.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.broker.schema.step_metrics import AgentFigures, StepMetrics
from headway.deploy.recipe.recipe import MlflowOptions, TensorBoardOptions, TrackioOptions, WandbOptions
from headway.deploy.run.agent_figures import flat_figures
from headway.deploy.run.events import EvaluationEvent, Event, HeartbeatEvent, StageEvent, StepEvent
from headway.deploy.run.figures import generated_per_s, trained_per_s, wait_fraction

from .base import SinkRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


HISTOGRAMS = {"lag_histogram", "token_lag_histogram", "response_length_histogram"}
PARTS = {"by_lag", "algorithm", "reward", "reward_samples", "agent"}
NO_CURVES = {"incarnation", "step", "total_steps", *HISTOGRAMS, *PARTS}
"""Fields of StepMetrics without a curve: they name the step, or consist of parts."""


def step_of(event: Event) -> int:
    """Return the step of the learner, or of the stage, at which the event's points lie."""
    match event:
        case StepEvent():
            return event.metrics.step
        case StageEvent():
            return event.steps
    return event.step


def points(event: Event) -> Iterator[tuple[str, float]]:
    """Yield one point of each curve: its tag and its value."""
    match event:
        case StepEvent():
            yield from _of_step(event.metrics)
        case EvaluationEvent():
            yield "evaluation/pass_rate", event.pass_rate
            further = (event.pass_at_k, event.reward_mean, event.response_tokens_mean)
            for name, value in zip(("pass_at_k", "reward_mean", "response_tokens_mean"), further, strict=True):
                if value is not None:
                    yield f"evaluation/{name}", value
            for name, value in event.reward.items():
                yield f"evaluation/reward/{name}", value
        case StageEvent():
            for name, figure in {"loss": event.loss, "pass_rate": event.pass_rate, **event.metrics}.items():
                if figure is not None:
                    yield f"stage/{name}", figure
        case HeartbeatEvent():
            yield "workers/living", len(event.workers)
            yield "workers/generated_tokens_per_s", generated_per_s(event.workers)
            for name, depth in msgspec.structs.asdict(event.queues).items():
                yield f"queues/{name}", depth
            for name, age_s in msgspec.structs.asdict(event.ages).items():
                if age_s is not None:
                    yield f"queues/{name}", age_s


def _of_step(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yield a step's points. A value that is not finite is None and leaves a gap in its curve."""
    for name, value in msgspec.structs.asdict(metrics).items():
        if name not in NO_CURVES and value is not None:
            yield f"step/{name}", value
    yield "step/trained_tokens_per_s", trained_per_s([metrics])
    yield "step/wait_fraction", wait_fraction([metrics])
    for part in ("algorithm", "reward", "reward_samples"):
        for name, value in getattr(metrics, part).items():
            yield f"{part}/{name}", value
    if isinstance(metrics.agent, AgentFigures):
        for name, value in flat_figures(metrics.agent).items():
            yield f"agent/{name}", value
    for lag, figures in metrics.by_lag.items():
        for name, value in msgspec.structs.asdict(figures).items():
            if value is not None:
                yield f"by_lag/{name}_{lag}", value


class _Tracker:
    """What all trackers are: no record of the run, and drawn from looks at the run, too."""

    is_record = False
    wants_heartbeats = True


TENSORBOARD_DIRECTORY = "tensorboard"
"""Name of its directory inside the run's."""


class TensorBoardSink(_Tracker):
    """Writes event files once there is something to write, and flushes them after every event.

    A resumed learner, or stage, trains steps anew. The sink purges what an earlier process wrote of these and later
    steps, so that curves show the steps that lead to the last weights.
    """

    def __init__(self, options: TensorBoardOptions) -> None:
        self._options = options
        self._directory = Path()
        self._writer: SummaryWriter | None = None

    def open(self, run: SinkRun) -> None:
        """Choose the directory. Each stage has its own, since steps that come again purge all of a directory."""
        chosen = self._options.directory
        self._directory = Path(chosen, run.name) if chosen else run.directory / TENSORBOARD_DIRECTORY / run.stage

    def write(self, event: Event) -> None:
        """Write one point of each curve. Raises OSError if it cannot be written."""
        step = step_of(event)
        writer = self._written_from(step)
        for tag, value in points(event):
            writer.add_scalar(tag, value, step)
        writer.flush()

    def close(self) -> None:
        """End the event file."""
        if self._writer is not None:
            self._writer.close()

    def _written_from(self, step: int) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        return self._writer


WANDB_STEP = "step"
"""The curve over which all others are drawn. wandb's own counter only grows, but a resumed run goes back."""


class WandbSink(_Tracker):
    """Logs every event's points. A resumed learner goes on with the same run of Weights & Biases: its id is the run's
    identity."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._run: Any = None

    def open(self, run: SinkRun) -> None:
        """Start or continue the run. Raises wandb.Error, as without a login."""
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._options.project,
            entity=self._options.entity or None,
            mode=self._options.mode or None,
            name=run.name,
            id=run.identity or None,
            resume="allow",
            dir=str(run.directory),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric=WANDB_STEP)

    def write(self, event: Event) -> None:
        """Log the event's points."""
        self._run.log({WANDB_STEP: step_of(event), **dict(points(event))})

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()


MLFLOW_IDENTITY = "headway.identity"
"""The tag by which a resumed learner finds its run of MLflow."""
MLFLOW_BATCH = 1000
"""The most metrics of one request."""


class MlflowSink(_Tracker):
    """Logs every event's points as metrics of one run of MLflow, which a resumed learner continues."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._client: Any = None
        self._run_id = ""

    def open(self, run: SinkRun) -> None:
        """Find or make experiment and run. Raises mlflow.exceptions.MlflowException."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._options.tracking_uri or None)
        name = self._options.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._run_id = self._run_of(run, experiment)
        self._client.set_terminated(self._run_id, "RUNNING")  # a resumed run had ended

    def _run_of(self, run: SinkRun, experiment: str) -> str:
        same = f"tags.`{MLFLOW_IDENTITY}` = '{run.identity}'"
        runs = self._client.search_runs([experiment], filter_string=same) if run.identity else []
        if not runs:
            runs = [self._client.create_run(experiment, run_name=run.name, tags={MLFLOW_IDENTITY: run.identity})]
        run_id: str = runs[0].info.run_id
        return run_id

    def write(self, event: Event) -> None:
        """Log the event's points, in as few requests as MLflow takes."""
        from mlflow.entities import Metric

        now_ms, step = int(time.time() * 1000), step_of(event)
        metrics = [Metric(mlflow_name(tag), float(value), now_ms, step) for tag, value in points(event)]
        for first in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MLFLOW_BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def mlflow_name(tag: str) -> str:
    """Return a curve's name as MLflow takes it, as a path of letters, digits, dashes, dots and spaces: a reward may
    call a measure as it likes, such as `pass@1`."""
    parts = re.sub(r"[^\w.\-/ ]", "_", tag).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


class TrackioSink(_Tracker):
    """Logs every event's points. A resumed learner goes on with the same run of trackio, whose name ends with the run's
    identity."""

    def __init__(self, options: TrackioOptions) -> None:
        self._options = options
        self._run: Any = None

    def open(self, run: SinkRun) -> None:
        """Start or continue the run."""
        import trackio

        self._run = trackio.init(
            project=self._options.project,
            name=f"{run.name}-{run.identity}".rstrip("-"),
            space_id=self._options.space_id or None,
            resume="allow",
            embed=False,
        )

    def write(self, event: Event) -> None:
        """Log the event's points."""
        self._run.log(dict(points(event)), step=step_of(event))

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
