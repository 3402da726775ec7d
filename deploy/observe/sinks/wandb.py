"""Curves for Weights & Biases, online or offline."""

from typing import Any

from headway.deploy.recipe.metric_sinks import WandbOptions
from headway.deploy.run.events import Event

from .base import SinkRun
from .points import points, step_of

STEP = "step"
"""The curve over which all others are drawn. wandb's own counter only grows, but a resumed run goes back."""


class WandbSink:
    """Logs every event's points. A resumed learner goes on with the same run of Weights & Biases: its id is the run's
    identity."""

    is_record = False
    wants_heartbeats = True

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
        self._run.define_metric("*", step_metric=STEP)

    def write(self, event: Event) -> None:
        """Log the event's points."""
        self._run.log({STEP: step_of(event), **dict(points(event))})

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()
