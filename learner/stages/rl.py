"""The learner's loop as a stage: it starts from a model, and each of its checkpoints is one."""

from pathlib import Path

from headway.learner.checkpoints.checkpoint import CheckpointError

from .base import StageMetrics
from .loop import Learner


class RlStage:
    """One rank of the learner's loop. `resuming.py` decides, with the broker, where it begins before it is opened."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def metrics(self) -> StageMetrics:
        """Steps of the whole run; the loss of the last step that this process trained."""
        return StageMetrics(steps=self._learner.version.step, loss=self._learner.loss)

    def run(self) -> bool:
        """Trains to the last step or the last prompt; False if stopped before. See `Learner.run`."""
        return self._learner.run()

    def save(self) -> Path:
        """Returns the checkpoint that `run` ended with. Raises CheckpointError where it was removed."""
        latest = self._learner.checkpoints.latest()
        if latest is None:
            raise CheckpointError("The run has ended, and its checkpoints are gone.")
        return latest.path
