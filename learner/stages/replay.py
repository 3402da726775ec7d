"""The learner over again from its log: the same batches in the same order, with no broker and no workers."""

from collections.abc import Iterator

from broker.errors import HeadwayError
from broker.schema import WeightVersion
from learner.experience.log import ExperienceLog
from learner.objective.update import Updater

from .loop import Stopwatch, TrainedStep


class ReplayError(HeadwayError):
    """The run cannot be replayed as asked; the message says what can."""


def replay(updater: Updater, experience_log: ExperienceLog, steps: range) -> Iterator[TrainedStep]:
    """Train these steps; after each yield the backend holds the weights that the step led to.

    With the settings, the rank count and the first weights of the run, every bit is as it was. Raises ReplayError.
    """
    for step in steps:
        watch = Stopwatch()
        groups = experience_log.read(step)
        if groups is None:
            raise ReplayError(
                f"The experience log does not hold step {step}; it can be replayed up to there (--steps)."
            )
        watch.lap("take")
        judged = updater.judge(groups, step)
        update = updater.update(judged.sequences, step)
        watch.lap("train")
        for phase in ("publish", "checkpoint"):
            watch.lap(phase)
        version = WeightVersion(0, step)
        yield TrainedStep(version=version, groups=groups, judged=judged, update=update, seconds=watch.seconds)
