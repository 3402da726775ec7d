"""A sink: it gets the figures of a run."""

import csv
from pathlib import Path

from headway.deploy.observe.sinks.base import SinkRun
from headway.deploy.run.events import Event, StepEvent


class Csv:
    """Appends a row for each step to a file in the run's directory."""

    is_record = False  # an error of this sink is logged, and training goes on
    wants_heartbeats = False

    def __init__(self, file: str = "steps.csv") -> None:
        """`file` is one of the sink's `options`."""
        self._file = file
        self._path = Path()

    def open(self, run: SinkRun) -> None:
        self._path = run.directory / self._file

    def write(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            with self._path.open("a", newline="") as file:
                csv.writer(file).writerow([event.metrics.step, event.metrics.reward_mean, event.metrics.lag_max])

    def close(self) -> None:
        """Every row is written already."""
