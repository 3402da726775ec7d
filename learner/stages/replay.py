"""A replay trains the batches of a run's log again, in the same order, without a broker or workers."""

from collections.abc import Iterator

from headway.broker.errors import HeadwayError
from headway.broker.schema import WeightVersion
from headway.learner.experience.log import ExperienceLog
from headway.learner.objective.update import Updater

from .loop import TrainedStep
from .stopwatch import Stopwatch


class ReplayError(HeadwayError):
    """The run cannot be replayed as asked; the message says which steps can be."""


def replay(updater: Updater, experience_log: ExperienceLog, steps: range) -> Iterator[TrainedStep]:
    """Trains these steps and yields each; the backend then holds the weights that the step led to.

    With the run's settings, rank count and first weights the results are the same, bit for bit. Raises ReplayError.
    """
    for step in steps:
        watch = Stopwatch()
        groups = experience_log.read(step)
        if groups is None:
            raise ReplayError(
                f"The experience log does not hold step {step}; it can be replayed up to there (--steps)."
            )
        watch.lap("take")
        scored = updater.compute_advantages(groups, step)
        batches = updater.pack(scored.sequences)
        watch.lap("pack")
        update = updater.update(batches, step)
        watch.lap("train")
        for phase in ("publish", "checkpoint"):
            watch.lap(phase)
        version = WeightVersion(0, step)
        yield TrainedStep(version=version, groups=groups, scored=scored, update=update, laps=watch.laps)
