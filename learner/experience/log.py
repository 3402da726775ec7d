"""The learner logs every batch before it trains it, so that a run can be replayed or rewound without its broker.

`Rewind` names the checkpoint to which a user goes back, and whether the steps after it are trained from the log again.

    experience/steps_FIRST.log    the batches of step FIRST and of those after it, in the order taken (see `log_files`)

There is one line of descent: a learner that trains another batch at step N abandons what the log from N on holds, and
it goes. The log is insurance: a full disk or damage is said, and costs nothing but the steps that it concerns.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.broker.errors import HeadwayError
from headway.broker.schema import Group, TrajectoryId
from headway.learner.checkpoint import Checkpoint, CheckpointStore
from headway.learner.disk import GONE, gone

from .log_files import (
    GroupFrames,
    LoggedBatchError,
    LogSegment,
    check_batch,
    read_batch,
    read_header,
    segments_in,
    tids_of,
    write_batch,
)

log = logging.getLogger(__name__)

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
"""The size from which a file gets no further batch."""
SHARE = 8
"""The log has at least so many files: it forgets whole ones where it is full."""


class ExperienceLog:
    """The batches of one run, by step. Only the learner that owns the run writes."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int = 0,
        needed_from: Callable[[], int] = lambda: 0,
        *,
        identity: str = "",
    ) -> None:
        """With `limit_bytes` 0 nothing new is logged. `needed_from` gives the lowest step from which a checkpoint could
        go on. Only batches of the run with this `identity` count as held; if it is empty, those of any run do."""
        self._directory = directory
        self._identity = identity
        self._limit_bytes = limit_bytes
        self._needed_from = needed_from
        self._segments = segments_in(directory)
        self._places = dict(sorted(held for segment in self._segments for held in segment.places.items()))
        for leftover in directory.glob(".step_*.staged"):
            leftover.unlink(missing_ok=True)
        self._is_failing = self._has_warned_of_loss = False

    @property
    def steps(self) -> list[int]:
        """The steps that the log has, ascending."""
        return sorted(self._places)

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the batch durably, or warns why it cannot. A batch that differs from the logged one drops later
        steps."""
        if self.tids(step) == tids_of(groups) and self.holds(step, groups):
            return
        self.drop_from(step)
        if not self._limit_bytes:
            return
        try:
            self._directory.mkdir(exist_ok=True)  # in a run's directory that was removed nothing is written
            segment = self._open_segment(step)
            segment.append(step, partial(write_batch, identity=self._identity, step=step, groups=groups))
            self._places[step] = segment.places[step]
        except (OSError, LoggedBatchError) as error:
            self._complain(step, error)
        else:
            self._is_failing = False
            self._make_room()

    def read(self, step: int) -> list[Group] | None:
        """Returns the batch of `step` as it was trained, or None where the log lacks it; a damaged one is a
        warning."""
        if step not in self._places:
            return None
        try:
            return read_batch(self._places[step], self._identity, step)
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._places[step]
            return None

    def tids(self, step: int) -> tuple[TrajectoryId, ...]:
        """Returns the ids of the trajectories of `step`, or none where the log lacks its batch."""
        with suppress(LoggedBatchError):
            return read_header(self._places[step], self._identity, step).tids if step in self._places else ()
        return ()

    def holds(self, step: int, groups: Sequence[Group]) -> bool:
        """True where these groups, in any order, are the batch of `step` to the last byte: names do not suffice, as a
        sample that was generated anew has the name of the one before."""
        return _contents(self.read(step) or ()) == _contents(groups)

    def held_until(self, step: int) -> int:
        """Returns the first step from `step` on whose batch the log lacks; a damaged one counts as lacking, with a
        warning."""
        try:
            while step in self._places:
                check_batch(self._places[step], self._identity, step)
                step += 1
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._places[step]
        return step

    def drop_from(self, step: int) -> None:
        """Deletes the batches of `step` and later ones: they belong to a branch that was abandoned."""
        for segment in reversed(self._segments):  # a crash leaves what is before the rest
            segment.cut(step)
        self._segments = [segment for segment in self._segments if segment.size]
        while next(reversed(self._places), -1) >= step:
            self._places.popitem()

    def _open_segment(self, step: int) -> LogSegment:
        """Returns the file for the batch of `step`, which is later than all that the log has."""
        last = self._segments[-1] if self._segments else None
        full_bytes = min(SEGMENT_BYTES, self._limit_bytes // SHARE)
        if last is None or not last.is_appendable or last.end >= full_bytes:
            last = LogSegment(self._directory / f"steps_{step}.log")
            self._segments.append(last)
        return last

    def _complain(self, step: int, error: OSError | LoggedBatchError) -> None:
        """Warns once, until writing succeeds again."""
        if not self._is_failing:
            remedy = "Make room, or lower checkpoint.log_bytes."
            if isinstance(error, OSError) and error.errno in GONE:
                remedy = gone(self._directory)
            log.warning(
                "The batch of step %d could not be written into %s (%s). Training goes on, but neither a rewind nor a"
                " replay can pass this step. %s",
                step,
                self._directory,
                error,
                remedy,
            )
        self._is_failing = True

    def _make_room(self) -> None:
        while sum(segment.size for segment in self._segments) > self._limit_bytes:
            oldest = self._segments.pop(0)
            steps = sorted(oldest.places)
            if not self._has_warned_of_loss and steps and steps[-1] >= self._needed_from():
                log.warning(
                    "The experience log is full (checkpoint.log_bytes=%.1f MiB) and forgets step %d, which a rewind to"
                    " the oldest checkpoint would train again. Raise checkpoint.log_bytes, or lower checkpoint.keep.",
                    self._limit_bytes / MIB,
                    steps[-1],
                )
                self._has_warned_of_loss = True
            oldest.remove()
            for step in steps:
                self._places.pop(step, None)


def _contents(groups: Sequence[Group]) -> dict[str, GroupFrames]:
    """Groups are compared by their frames: another version of zstd may compress the same batch differently."""
    return {group.prompt.group: GroupFrames.of(group) for group in groups}


class RewindError(HeadwayError):
    """The run cannot go back there; the message says where it can."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """The user asks for the weights of the checkpoint at `step`, and for the steps from it on once more."""

    step: int
    regenerate: bool = False
    """Forget what was sampled for the steps after it, instead of training the same batches again."""


def find_rewind_checkpoint(checkpoints: CheckpointStore, rewind: Rewind) -> Checkpoint:
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
    find_rewind_checkpoint(checkpoints, rewind)
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
