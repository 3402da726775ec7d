"""A learner finds where it begins in its run: its checkpoint, its identity, and the steps that it trains again.

    choose a checkpoint ──► identify the run ──► open the log ──► claim the run ──► Start, which all ranks share
    (every rank loads it)   (noted, saved        (holds batches   (the broker says what
                             or joined)           to replay)       it has and has forgotten)

The caller notes the identity before it claims the run, and the incarnation before weights are published under it. This
module writes only the log into the run's directory.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointGroups, CheckpointMark, Claim, new_identity
from headway.broker.errors import ConfigError
from headway.broker.schema import RunRules, WeightVersion
from headway.learner.checkpoint import Checkpoint, CheckpointStore, LearnerState, load_first
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience.log import ExperienceLog, Rewind, check_rewind, find_rewind_checkpoint
from headway.learner.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The user's request, and the checkpoint that every rank has loaded for it."""

    resume: bool
    rewind: Rewind | None
    checkpoint: Checkpoint | None
    """The checkpoint; None for the run's first weights."""
    is_branch: bool
    """True if the learner goes on from another checkpoint than the latest."""

    @property
    def state(self) -> LearnerState | None:
        return self.checkpoint.state if self.checkpoint else None

    @property
    def step(self) -> int:
        """The first step to train."""
        return self.state.step if self.state else 0

    @property
    def regenerates(self) -> bool:
        """True if the samples for the steps from here on are to be forgotten and generated again."""
        return self.rewind is not None and self.rewind.regenerate


class Start(msgspec.Struct, frozen=True):
    """The point at which all ranks begin, as rank 0 learned it from the broker."""

    version: WeightVersion
    identity: str
    """The run's identity."""
    caught_up_at: int
    is_branch: bool = False


@dataclass(frozen=True, kw_only=True)
class RunClaim:
    """A claimed run, the point at which to begin in it, and the steps to train from the log."""

    claim: Claim
    start: Start
    replayed: range
    """The steps that the broker has settled or forgotten."""


def choose_origin(
    checkpoints: CheckpointStore, load: Callable[[Path], None], ranks: Ranks, *, resume: bool, rewind: Rewind | None
) -> Origin:
    """Loads the requested checkpoint, or the newest that every rank can load. Collective.

    Raises RewindError where there is none at the step of `rewind`, CheckpointError where none can be loaded.
    """
    lineage = checkpoints.lineage()[::-1] if resume else []
    candidates = [find_rewind_checkpoint(checkpoints, rewind)] if rewind else lineage
    checkpoint = load_first(candidates, load, ranks) if candidates else None
    if resume and checkpoint is None:
        checkpoints.check_any_is_whole()
        log.warning("no checkpoint to resume from yet: starting from the first weights")
    is_older = checkpoint is not None and bool(lineage) and checkpoint.path != lineage[0].path
    return Origin(resume=resume, rewind=rewind, checkpoint=checkpoint, is_branch=rewind is not None or is_older)


def identify(blocking: BlockingBroker, origin: Origin, directory: Path, noted: str) -> str:
    """Returns the run's identity; `noted` is the one in `directory`. The caller notes it before it claims the run.

    A run that was made before runs had identities takes its checkpoint's, the broker's, or a new one. Raises
    ConfigError for the checkpoint of another run.
    """
    saved = origin.state.identity if origin.state else ""
    if origin.checkpoint and noted and saved not in ("", noted):
        raise ConfigError(
            f"{origin.checkpoint.path} is a checkpoint of another run (identity {saved}) than the one in {directory}"
            f" (identity {noted}). Move it back to its own run; to start a new run from its weights, name them as"
            " model.path."
        )
    return noted or saved or (blocking.call(blocking.broker.join()) if origin.resume else "") or new_identity()


def open_log(
    origin: Origin, checkpoints: CheckpointStore, directory: Path, max_bytes: int, identity: str
) -> ExperienceLog:
    """Opens the log in `directory`, empty for a run that starts. Raises RewindError where it lacks a batch that a
    rewind trains again."""
    opened = ExperienceLog(directory, max_bytes, checkpoints.oldest_step, identity=identity)
    if origin.rewind is not None:
        check_rewind(checkpoints, opened, origin.rewind)
    elif not origin.resume:
        opened.drop_from(0)
    return opened


def claim_run(
    blocking: BlockingBroker,
    origin: Origin,
    experience_log: ExperienceLog,
    cursor: PromptCursor,
    *,
    identity: str,
    last_incarnation: int,
    rules: RunRules,
    config: bytes,
) -> RunClaim:
    """Takes the run over. `last_incarnation` is the last that a learner noted, `config` the recipe as workers read it.

    Raises the errors of `Batches.claim`.
    """
    saved_incarnation = origin.state.incarnation if origin.state else 0
    mark = CheckpointMark(max(saved_incarnation, last_incarnation), origin.step)
    replayable_to = 0 if origin.regenerates else experience_log.held_until(mark.step)
    claim = blocking.call(
        blocking.broker.batches.claim(
            checkpoint=mark,
            rules=rules,
            config=config,
            resume=origin.resume,
            contains=CheckpointGroups(cursor.watermark, cursor.trained_beyond),
            replayable_to=replayable_to,
            regenerate=origin.regenerates,
            identity=identity,
        )
    )
    if origin.regenerates or claim.is_rewound:
        log.warning("what was sampled for the steps from %d on is forgotten, and generated anew", mark.step)
        experience_log.drop_from(mark.step)
    return _begin(origin, claim, identity, replayable_to)


def _begin(origin: Origin, claim: Claim, identity: str, replayable_to: int) -> RunClaim:
    """Returns the start that follows from the broker's memory of the run."""
    is_anew = origin.regenerates or claim.is_rewound
    is_forgotten = claim.highest_announced is None  # another server than the one that the run began with
    is_replayed = not is_anew and (is_forgotten or claim.committed_step > origin.step)
    start = Start(
        version=WeightVersion(claim.owner.incarnation, origin.step),
        identity=identity,
        caught_up_at=0 if is_anew else replayable_to if is_forgotten else claim.highest_announced or 0,
        is_branch=is_anew or origin.is_branch,
    )
    return RunClaim(claim=claim, start=start, replayed=range(origin.step, replayable_to) if is_replayed else range(0))
