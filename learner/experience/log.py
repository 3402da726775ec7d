"""The learner logs every batch before it trains it, so that a run can be replayed or rewound without its broker.

    experience/step_K.zst    the batch of step K in the order taken (see `logged_batch`)

There is one line of descent: a learner that trains another batch at step N abandons what the files from N on hold, and
they go. The log is insurance: a full disk or a damaged file is said, and costs nothing but the steps that it concerns.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from broker.schema import Group, TrajectoryId
from learner.checkpoints.disk import GONE, gone

from .frames import GroupFrames
from .logged_batch import LoggedBatchError, check_batch, read_batch, read_header, tids_of, write_batch

log = logging.getLogger(__name__)

MIB = 1 << 20


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
        self._sizes = {
            step: path.stat().st_size for path in directory.glob("step_*.zst") if (step := _step_of(path)) >= 0
        }
        for leftover in directory.glob(".step_*.staged"):
            leftover.unlink(missing_ok=True)
        self._is_failing = self._was_told_of_loss = False

    @property
    def steps(self) -> list[int]:
        """The steps that have a file, ascending."""
        return sorted(self._sizes)

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
            write_batch(self._path(step), self._identity, step, groups)
            self._sizes[step] = self._path(step).stat().st_size
        except (OSError, LoggedBatchError) as error:
            self._complain(step, error)
        else:
            self._is_failing = False
            self._make_room()

    def read(self, step: int) -> list[Group] | None:
        """Returns the batch of `step` as it was trained, or None where the log lacks it; a damaged file is a
        warning."""
        if step not in self._sizes:
            return None
        try:
            return read_batch(self._path(step), self._identity, step)
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._sizes[step]
            return None

    def tids(self, step: int) -> tuple[TrajectoryId, ...]:
        """Returns the ids of the trajectories of `step`, or none where the log lacks its batch."""
        with suppress(LoggedBatchError):
            return read_header(self._path(step), self._identity, step).tids if step in self._sizes else ()
        return ()

    def holds(self, step: int, groups: Sequence[Group]) -> bool:
        """True where these groups, in any order, are the batch of `step` to the last byte: names do not suffice, as a
        sample that was generated anew has the name of the one before."""
        return _contents(self.read(step) or ()) == _contents(groups)

    def held_until(self, step: int) -> int:
        """Returns the first step from `step` on whose batch the log lacks; a damaged file counts as lacking, with a
        warning."""
        try:
            while step in self._sizes:
                check_batch(self._path(step), self._identity, step)
                step += 1
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._sizes[step]
        return step

    def drop_from(self, step: int) -> None:
        """Deletes the batches of `step` and later ones: they belong to a branch that was abandoned."""
        for later in [held for held in self._sizes if held >= step]:
            self._remove(later)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.zst"

    def _complain(self, step: int, error: OSError | LoggedBatchError) -> None:
        """Warns once, until writing succeeds again."""
        if not self._is_failing:
            remedy = "Make room, or lower checkpoint.log_bytes."
            if isinstance(error, OSError) and error.errno in GONE:
                remedy = gone(self._directory)
            log.warning(
                "%s could not be written (%s). Training goes on, but neither a rewind nor a replay can pass this step."
                " %s",
                self._path(step),
                error,
                remedy,
            )
        self._is_failing = True

    def _make_room(self) -> None:
        while sum(self._sizes.values()) > self._limit_bytes:
            oldest = min(self._sizes)
            if not self._was_told_of_loss and oldest >= self._needed_from():
                log.warning(
                    "The experience log is full (checkpoint.log_bytes=%.1f MiB) and forgets step %d, which a rewind to"
                    " the oldest checkpoint would train again. Raise checkpoint.log_bytes, or lower checkpoint.keep.",
                    self._limit_bytes / MIB,
                    oldest,
                )
                self._was_told_of_loss = True
            self._remove(oldest)

    def _remove(self, step: int) -> None:
        del self._sizes[step]
        with suppress(OSError):
            self._path(step).unlink()


def _contents(groups: Sequence[Group]) -> dict[str, GroupFrames]:
    """Groups are compared by their frames: another version of zstd may compress the same batch differently."""
    return {group.prompt.group: GroupFrames.of(group) for group in groups}


def _step_of(path: Path) -> int:
    """Returns the step in the file's name, or -1 where the log did not write the file."""
    step = path.stem.removeprefix("step_")
    return int(step) if step.isdecimal() else -1
