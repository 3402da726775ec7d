"""Going back on purpose: from which checkpoint, and whether the steps after it are trained again or generated anew."""

from dataclasses import dataclass

from headway.broker.errors import HeadwayError
from headway.learner.checkpoints.checkpoint import Checkpoint, CheckpointStore

from .log import ExperienceLog


class RewindError(HeadwayError):
    """The run cannot go back there; the message says where it can."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """The user asks for the weights of the checkpoint at `step`, and for the steps from it on once more."""

    step: int
    regenerate: bool = False
    """Forget what was sampled for the steps after it, instead of training the same batches again."""


def rewound_to(checkpoints: CheckpointStore, rewind: Rewind) -> Checkpoint:
    """Returns the checkpoint that the user asks for. Raises RewindError, which lists the existing ones."""
    lineage = checkpoints.lineage()
    for checkpoint in lineage:
        if checkpoint.state.step == rewind.step:
            return checkpoint
    raise RewindError(f"There is no checkpoint at step {rewind.step} to rewind to: {_listed(lineage)}.")


def check_rewind(checkpoints: CheckpointStore, log: ExperienceLog, rewind: Rewind) -> None:
    """Raises RewindError where the log has a hole in what would be trained again, or there is no such checkpoint.

    Where it lacks the very first step there is nothing to choose: all is generated anew.
    """
    rewound_to(checkpoints, rewind)
    reached = checkpoints.lineage()[-1].state.step
    until = log.held_until(rewind.step)
    if rewind.regenerate or until == rewind.step or until >= reached:
        return
    able = [checkpoint for checkpoint in checkpoints.lineage() if log.held_until(checkpoint.state.step) >= reached]
    raise RewindError(
        f"The run has come to step {reached}, but the experience log holds steps {rewind.step} to {until - 1} only, so"
        f" the rest cannot be trained again as it was. Add --regenerate to generate it anew, or rewind to a checkpoint"
        f" from which nothing is missing: {_listed(able)}."
    )


def _listed(checkpoints: list[Checkpoint]) -> str:
    return ", ".join(f"{checkpoint.state.step}" for checkpoint in checkpoints) or "there is none"
