"""Curves for MLflow, on a server or in a store of files."""

import re
import time
from typing import Any

from headway.deploy.recipe.metric_sinks import MlflowOptions
from headway.deploy.run.events import Event

from .base import SinkRun
from .points import points, step_of

IDENTITY = "headway.identity"
"""The tag by which a resumed learner finds its run of MLflow."""
MOST_AT_ONCE = 1000
"""The most metrics of one request."""


class MlflowSink:
    """Logs every event's points as metrics of one run of MLflow, which a resumed learner continues."""

    is_record = False
    wants_heartbeats = True

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
        same = f"tags.`{IDENTITY}` = '{run.identity}'"
        runs = self._client.search_runs([experiment], filter_string=same) if run.identity else []
        if not runs:
            runs = [self._client.create_run(experiment, run_name=run.name, tags={IDENTITY: run.identity})]
        run_id: str = runs[0].info.run_id
        return run_id

    def write(self, event: Event) -> None:
        """Log the event's points, in as few requests as MLflow takes."""
        from mlflow.entities import Metric

        now_ms, step = int(time.time() * 1000), step_of(event)
        metrics = [Metric(name_of(tag), float(value), now_ms, step) for tag, value in points(event)]
        for first in range(0, len(metrics), MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_AT_ONCE])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def name_of(tag: str) -> str:
    """Return a curve's name as MLflow takes it, as a path of letters, digits, dashes, dots and spaces: a reward may
    call a measure as it likes, such as `pass@1`."""
    parts = re.sub(r"[^\w.\-/ ]", "_", tag).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)
