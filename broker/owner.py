"""The learner that claimed a run last owns it, and every verb of a learner carries its Owner."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """One learner's hold on the run; refused once another one has claimed it."""

    incarnation: int
    token: str


@dataclass(frozen=True)
class CheckpointMark:
    """The checkpoint that a learner starts from; (0, 0) for a fresh start. Step N contains the steps < N."""

    incarnation: int
    """The checkpoint's incarnation, or a later one that its learners know of. The next one is above it, even on a
    server that has forgotten it."""
    step: int


@dataclass(frozen=True)
class CheckpointGroups:
    """The groups that a checkpoint contains: all below the watermark, and those named."""

    watermark: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """The state in which a learner finds a run that it takes over."""

    owner: Owner
    identity: str
    """The run's identity."""
    highest_announced: int | None
    """The step of the newest announced weights; None if no weights were ever announced."""
    committed_step: int = 0
    """All steps below this one were committed before."""
    is_rewound: bool = False
    """Whether the run has forgotten the steps that were committed from the checkpoint's step on."""
