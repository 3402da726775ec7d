"""What every step trained, on disk before it is trained: a run can be replayed, and rewound, without its broker.

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
        """`limit_bytes` 0: nothing new is logged. `needed_from`: the lowest step that a checkpoint could go on from.
        `identity`: of the run, whose batches alone count as held; empty: of any."""
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
        """Those that there is a file of, ascending."""
        return sorted(self._sizes)

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Durable when it returns, or a warning has said why not. Another batch than before abandons later steps."""
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
        """The batch of `step` as it was trained; None where it is not held, with a warning if that is by damage."""
        if step not in self._sizes:
            return None
        try:
            return read_batch(self._path(step), self._identity, step)
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._sizes[step]
            return None

    def tids(self, step: int) -> tuple[TrajectoryId, ...]:
        """Of the batch of `step`; none where it is not held."""
        with suppress(LoggedBatchError):
            return read_header(self._path(step), self._identity, step).tids if step in self._sizes else ()
        return ()

    def holds(self, step: int, groups: Sequence[Group]) -> bool:
        """Whether these, in whichever order, are the batch of `step` to the last byte: a sample that was generated anew
        has the name of the one before."""
        return _contents(self.read(step) or ()) == _contents(groups)

    def held_until(self, step: int) -> int:
        """The first step from `step` on whose batch is not there, whole; a warning where that is by damage."""
        try:
            while step in self._sizes:
                check_batch(self._path(step), self._identity, step)
                step += 1
        except LoggedBatchError as error:
            log.warning("%s", error)
            del self._sizes[step]
        return step

    def drop_from(self, step: int) -> None:
        """Forget the batches of `step` and later ones: they belong to a branch that was abandoned."""
        for later in [held for held in self._sizes if held >= step]:
            self._remove(later)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.zst"

    def _complain(self, step: int, error: OSError | LoggedBatchError) -> None:
        """Once, until it works again."""
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
    """Compared by these: another version of zstd may have compressed the same batch differently."""
    return {group.prompt.group: GroupFrames.of(group) for group in groups}


def _step_of(path: Path) -> int:
    """-1 for a file that is not of the log."""
    step = path.stem.removeprefix("step_")
    return int(step) if step.isdecimal() else -1
