"""Curves for TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING

from headway.deploy.recipe.metric_sinks import TensorBoardOptions
from headway.deploy.run.events import Event

from .base import SinkRun
from .points import points, step_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIRECTORY = "tensorboard"
"""Name of its directory inside the run's."""


class TensorBoardSink:
    """Writes event files once there is something to write, and flushes them after every event.

    A resumed learner, or stage, trains steps anew. The sink purges what an earlier process wrote of these and later
    steps, so that curves show the steps that lead to the last weights.
    """

    is_record = False
    wants_heartbeats = True

    def __init__(self, options: TensorBoardOptions) -> None:
        self._options = options
        self._directory = Path()
        self._writer: SummaryWriter | None = None

    def open(self, run: SinkRun) -> None:
        """Choose the directory. Each stage has its own, since steps that come again purge all of a directory."""
        chosen = self._options.directory
        self._directory = Path(chosen, run.name) if chosen else run.directory / DIRECTORY / run.stage

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
