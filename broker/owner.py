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
    """Its own, or a later one that its learners know of: the next is above it, whatever the server remembers."""
    step: int


@dataclass(frozen=True)
class Contains:
    """A checkpoint has been trained on all groups below the watermark, and on these."""

    watermark: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """The state in which a learner finds a run that it takes over."""

    owner: Owner
    identity: str
    """The run's identity."""
    highest_announced: int | None
    """Step of the newest announced weights; None if nothing was ever announced."""
    committed_step: int = 0
    """All steps below it were committed before."""
    is_rewound: bool = False
    """The run has forgotten what was committed from the checkpoint's step on."""
