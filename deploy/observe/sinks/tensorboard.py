"""Curves for TensorBoard: a step's figures, pass rates and the pool of workers, all over learner steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from broker.schema import StepMetrics
from deploy.recipe.sinks import TensorBoardOptions
from deploy.run.events import EvaluationEvent, Event, HeartbeatEvent, StepEvent
from deploy.run.figures import generated_per_s, trained_per_s, wait_fraction

from .base import SinkRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIRECTORY = "tensorboard"
"""Name of its directory inside the run's."""
NO_CURVES = {"incarnation", "step", "total_steps", "lag_histogram", "algorithm"}
"""Fields of StepMetrics without a curve: they name the step, or consist of parts."""


class TensorBoardSink:
    """Writes event files once there is something to write, and flushes them after every event.

    A resumed learner trains steps anew. The sink purges what an earlier learner wrote of these and later steps, so that
    curves show the steps that lead to the last weights.
    """

    is_record = False
    wants_heartbeats = True

    def __init__(self, options: TensorBoardOptions) -> None:
        self._options = options
        self._directory = Path()
        self._writer: SummaryWriter | None = None

    def open(self, run: SinkRun) -> None:
        """Choose the directory."""
        chosen = self._options.directory
        self._directory = Path(chosen, run.name) if chosen else run.directory / DIRECTORY

    def write(self, event: Event) -> None:
        """Write one point of each curve. Raises OSError if it cannot be written."""
        step = event.metrics.step if isinstance(event, StepEvent) else event.step
        writer = self._written_from(step)
        for tag, value in _points(event):
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


def _points(event: Event) -> Iterator[tuple[str, float]]:
    match event:
        case StepEvent():
            yield from _of_step(event.metrics)
        case EvaluationEvent():
            yield "evaluation/pass_rate", event.pass_rate
        case HeartbeatEvent():
            yield "workers/living", len(event.workers)
            yield "workers/generated_tokens_per_s", generated_per_s(event.workers)
            for name, depth in msgspec.structs.asdict(event.queues).items():
                yield f"queues/{name}", depth


def _of_step(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yield a step's points. A value that is not finite is None and leaves a gap in its curve."""
    for name, value in msgspec.structs.asdict(metrics).items():
        if name not in NO_CURVES and value is not None:
            yield f"step/{name}", value
    yield "step/trained_tokens_per_s", trained_per_s([metrics])
    yield "step/wait_fraction", wait_fraction([metrics])
    for name, value in metrics.algorithm.items():
        yield f"algorithm/{name}", value
