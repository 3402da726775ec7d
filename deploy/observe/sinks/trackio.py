"""Curves for trackio, on this machine or in a Space of Hugging Face."""

from typing import Any

from headway.deploy.recipe.metric_sinks import TrackioOptions
from headway.deploy.run.events import Event

from .base import SinkRun
from .points import points, step_of


class TrackioSink:
    """Logs every event's points. A resumed learner goes on with the same run of trackio, whose name ends with the run's
    identity."""

    is_record = False
    wants_heartbeats = True

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
