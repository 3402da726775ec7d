"""Who trains a run: the learner that claimed it last. Every learner verb carries its Owner."""

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
    """What a checkpoint has been trained on: all groups below the watermark, and these."""

    watermark: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """What a learner finds when it takes a run over."""

    owner: Owner
    identity: str
    """Of the run."""
    highest_announced: int | None
    """Step of the newest announced weights; None if nothing was ever announced."""
    committed_step: int = 0
    """All steps below it were committed before."""
    is_rewound: bool = False
    """The run has forgotten what was committed from the checkpoint's step on."""
