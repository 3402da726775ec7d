"""The layout of checkpoints on disk, the test of whether one is whole, and the learner's own state in it.

    checkpoints/INCARNATION/step_N/    contains the steps < N; a Hugging Face model with its tokenizer on top
        learner.json                   LearnerState
        files.json                     all other files with their sizes; written last, makes the checkpoint whole
        digests.json                   CRC-32 sums that a resumed learner checks; added once it is durable
    checkpoints/best                   a link to the best one, where the recipe says what is best (`Best`)

A directory appears under its name only once all of it is durable, and older ones go only after that. The digests tell
whether a checkpoint still holds the bytes that were written, as torch loads most damage silently; where the learner
died before it added them, only the files' sizes are checked. A resumed learner goes on from the newest checkpoint that
every rank can load.
"""

import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import msgspec

from headway.broker.errors import HeadwayError

from .disk import GONE, free_mib, gone, sync

if TYPE_CHECKING:
    from headway.learner.ranks import Ranks


LINK, RECORD = "best", "best.json"


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best checkpoint, and the metric by which it is."""

    metric: str
    mode: Literal["max", "min"]
    value: float
    incarnation: int
    step: int


class Best:
    """Chooses the best of a run's checkpoints and remembers it over restarts. Of equal ones the earliest is the
    best."""

    def __init__(self, root: Path, metric: str, mode: Literal["max", "min"]) -> None:
        self._root = root
        self._metric = metric
        self._mode = mode
        self._measured: dict[int, float] = {}
        """Values of steps whose checkpoints were not durable when the evaluation ended."""
        self.awaited: Callable[[], Collection[int]] = tuple
        """Returns the steps whose evaluations are under way."""

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note what an evaluation of the weights of `step` has measured. `choose` follows."""
        value = metrics.get(self._metric, math.nan)
        if math.isfinite(value):
            self._measured[step] = value

    def choose(self, lineage: Mapping[tuple[int, int], Path]) -> set[Path]:
        """Choose among the durable checkpoints (by incarnation and step) that led to the latest, and return those that
        must stay. A best one that a rewind has left behind is the best no longer."""
        best = self._held(lineage)
        for (incarnation, step), path in sorted(lineage.items()):
            value = self._measured.pop(step, None)
            if value is not None and (best is None or self._is_better(value, best.value)):
                best = BestCheckpoint(
                    metric=self._metric, mode=self._mode, value=value, incarnation=incarnation, step=step
                )
                log.info("the best checkpoint by %s (%.4g) is %s", self._metric, value, path)
        self._store(best)
        awaited = {path for (_, step), path in lineage.items() if step in self.awaited()}
        return awaited | ({lineage[best.incarnation, best.step]} if best else set())

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self._mode == "max" else value < than

    def _held(self, lineage: Mapping[tuple[int, int], Path]) -> BestCheckpoint | None:
        """Return the best one until now; None if it was chosen by another rule."""
        held = read_best(self._root)
        if held is None or (held.metric, held.mode) != (self._metric, self._mode):
            return None
        return held if (held.incarnation, held.step) in lineage else None

    def _store(self, best: BestCheckpoint | None) -> None:
        """Write the record, and then the link, which a crash between the two leaves as it was until the next call."""
        record, link = self._root / RECORD, self._root / LINK
        if best is None:
            for path in (link, record):
                path.unlink(missing_ok=True)
            return
        if read_best(self._root) != best:
            replaced = record.with_name(f".{RECORD}")
            replaced.write_bytes(msgspec.json.format(msgspec.json.encode(best)))
            sync(replaced)
            replaced.replace(record)
        target = Path(str(best.incarnation), f"step_{best.step}")
        if not link.is_symlink() or link.readlink() != target:
            replaced = link.with_name(f".{LINK}")
            replaced.unlink(missing_ok=True)
            replaced.symlink_to(target, target_is_directory=True)
            replaced.replace(link)
        sync(self._root)


def read_best(root: Path) -> BestCheckpoint | None:
    """Return the record in a run's directory of checkpoints; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode((root / RECORD).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read (%s): the best checkpoint is chosen anew.", root / RECORD, error)
        return None


STATE_FILE, FILES_FILE = "learner.json", "files.json"
MOST_DESCRIBING_BYTES = 1 << 28
"""The most bytes of a file that describes a checkpoint."""

log = logging.getLogger(__name__)


class CheckpointError(HeadwayError):
    """A checkpoint could not be written or read."""


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's state besides weights, moments and RNG."""

    identity: str = ""
    """The run's identity; empty in checkpoints from before runs had one."""
    incarnation: int
    step: int
    """The next step; the checkpoint contains all steps below it."""
    cursor: dict[str, Any] = {}
    """`PromptCursor.state`: which prompts have been trained."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: LearnerState


class CheckpointStore:
    """All checkpoints of one run, over all its incarnations."""

    def __init__(self, root: Path, keep: int, best: Best | None = None) -> None:
        """`keep`: newest checkpoints that stay; `best`: chooses one more that does."""
        self._root = root
        self._keep = keep
        self._best = best

    def path(self, incarnation: int, step: int) -> Path:
        return self._root / str(incarnation) / f"step_{step}"

    def latest(self) -> Checkpoint | None:
        """The whole checkpoint with the highest (incarnation, step); a warning for every damaged one."""
        return next(self._lineage(), None)

    def lineage(self) -> list[Checkpoint]:
        """The whole checkpoints that led to the latest, and it, oldest first."""
        return list(self._lineage())[::-1]

    def check_any_is_whole(self) -> None:
        """Raises CheckpointError, with the fault of the newest, where there are checkpoints and none is whole."""
        paths = self._newest_first()
        if not paths or any(map(_is_whole, paths)):
            return
        try:
            read_checkpoint(paths[0])
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} No other checkpoint is whole. Restore its files, or start anew (--overwrite)."
            ) from error

    def oldest_step(self) -> int:
        """Returns the lowest step of the checkpoints that led to the latest; 0 where there is none."""
        return min((checkpoint.state.step for checkpoint in self._lineage()), default=0)

    def _lineage(self) -> Iterator[Checkpoint]:
        """Newest first. Checkpoints at or above a later incarnation's belong to a branch that it abandoned."""
        below = None
        for path in self._newest_first():
            try:
                found = read_checkpoint(path)
            except CheckpointError as error:
                log.warning("%s Looking for an older one.", error)
                continue
            if below is None or found.state.step < below:
                below = found.state.step
                yield found

    def _newest_first(self) -> list[Path]:
        found = [path for path in self._root.glob("*/step_*") if _order(path) is not None]
        return sorted(found, key=lambda path: _order(path) or (0, 0), reverse=True)

    def choose_best(self) -> set[Path]:
        """Chooses the best checkpoint as of now, and returns those that stay for that; none where no metric says what
        is best."""
        if self._best is None:
            return set()
        return self._best.choose({(one.state.incarnation, one.state.step): one.path for one in self._lineage()})

    def retired(self) -> list[Path]:
        """Returns all but the newest `keep` and the best one, and remains of a crash, renamed at once, for the caller
        to delete."""
        kept = [path for path in self._newest_first() if _is_whole(path)][: self._keep]
        kept += self.choose_best()
        for path in self._newest_first():
            if path not in kept:
                path.rename(path.with_name(f".{path.name}.retired"))
        return [*self._root.glob("*/.step_*")]


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads the state. Raises CheckpointError unless every file is there in full length."""
    try:
        sizes = msgspec.json.decode(read_small(path / FILES_FILE), type=dict[str, int])
        state = msgspec.json.decode(read_small(path / STATE_FILE), type=LearnerState)
        damaged = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"Checkpoint {path} is not whole: {error}.") from error
    if damaged:
        raise CheckpointError(
            f"Checkpoint {path} is not whole: {damaged[0]} has not the {sizes[damaged[0]]} bytes written."
        )
    return Checkpoint(path, state)


def read_small(path: Path) -> bytes:
    """Returns the content of a file that describes a checkpoint. Raises CheckpointError for one of more than
    `MOST_DESCRIBING_BYTES`."""
    if (size := path.stat().st_size) > MOST_DESCRIBING_BYTES:
        raise CheckpointError(f"{path} has {size >> 20} MiB; at most {MOST_DESCRIBING_BYTES >> 20} MiB are read.")
    return path.read_bytes()


def partial_path(directory: Path) -> Path:
    """Returns the path at which `directory` is written before it gets its name."""
    return directory.with_name(f".{directory.name.lstrip('.')}.partial")


def put_in_place(written: Path, directory: Path) -> None:
    """Give a directory its final name in one durable step."""
    sync_tree(written)
    replaced = directory.with_name(f".{directory.name}.replaced")
    if directory.exists():
        directory.rename(replaced)
    written.rename(directory)
    sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_tree(directory: Path) -> None:
    """Wait until every file and folder in it is on the disk; what another rank renames meanwhile, that rank syncs."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(FileNotFoundError):
                sync(Path(folder, name))
        sync(Path(folder))


def could_not_write(path: Path, error: BaseException | None) -> BaseException:
    """Returns a CheckpointError with the remedy for a full disk or a directory that is gone; a bug stays as it is.

    `error` is None where another rank has it.
    """
    from safetensors import SafetensorError

    if error is None:
        reason = "another rank failed, and says why"
    elif not isinstance(error, OSError | SafetensorError | RuntimeError):  # torch's writer raises RuntimeError
        return error
    elif _is_gone(path, error):
        return CheckpointError(f"Checkpoint {path} could not be written. {gone(path.parents[1])}")
    else:
        reason = str(error).strip().splitlines()[-1]
    return CheckpointError(
        f"Checkpoint {path} could not be written: {reason} ({free_mib(path):.0f} MiB are free there). Older "
        "checkpoints are untouched. Make room or lower checkpoint.keep, then resume."
    )


def _is_gone(path: Path, error: Exception) -> bool:
    """True if the directory's folder was removed; torch and safetensors do not always say why a write failed."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in GONE
    return not path.parent.exists()


def seal(directory: Path, state: LearnerState) -> None:
    """Adds the files that make a directory of models a whole checkpoint."""
    (directory / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    (directory / FILES_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sizes)))


def _order(path: Path) -> tuple[int, int] | None:
    incarnation, step = path.parent.name, path.name.removeprefix("step_")
    return (int(incarnation), int(step)) if incarnation.isdecimal() and step.isdecimal() else None


def _is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


DIGESTS_FILE = "digests.json"
_READ_BYTES = 4 << 20


def add_digests(checkpoint: Path) -> None:
    """Adds the digests durably. A checkpoint that is retired meanwhile gets none."""
    with suppress(FileNotFoundError):
        digests = {name: _digest(checkpoint / name) for name in _names(checkpoint)}
        partial = checkpoint / f".{DIGESTS_FILE}"
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(digests)))
            sync(partial)
            partial.rename(checkpoint / DIGESTS_FILE)
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("%s: the files' digests could not be added (%s); damage to it may go unnoticed", partial, error)


def check_digests(checkpoint: Path, rank: int, world_size: int) -> None:
    """Checks this rank's share of the files. Raises CheckpointError where one has other bytes than were written."""
    path = checkpoint / DIGESTS_FILE
    if not path.exists():
        return
    try:
        digests = msgspec.json.decode(read_small(path), type=dict[str, int])
        own = sorted(digests)[rank::world_size]
        damaged = [name for name in own if _digest(checkpoint / name) != digests[name]]
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"Checkpoint {checkpoint} cannot be read: {error}.") from error
    if damaged:
        raise CheckpointError(f"Checkpoint {checkpoint} is damaged: {damaged[0]} has other bytes than were written.")


def _names(checkpoint: Path) -> list[str]:
    files = (Path(folder, name) for folder, _, names in os.walk(checkpoint) for name in names)
    own = {checkpoint / DIGESTS_FILE, checkpoint / f".{DIGESTS_FILE}"}
    return sorted(str(path.relative_to(checkpoint)) for path in files if path not in own)


def _digest(path: Path) -> int:
    digest = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest = crc32(part, digest)
    return digest


def load_first(checkpoints: Sequence[Checkpoint], load: Callable[[Path], None], ranks: "Ranks") -> Checkpoint:
    """Loads the first of these that is undamaged on all ranks, and returns it. Collective.

    A warning names each one that it passes over. Where none can be loaded it raises CheckpointError, which says what is
    wrong with the first one.
    """
    first: Exception | None = None
    for checkpoint in checkpoints:
        failure = _failure(checkpoint, load, ranks)
        if failure is None:
            log.info("resuming from %s", checkpoint.path)
            return checkpoint
        if checkpoint is not checkpoints[-1]:
            log.warning("%s Going back to the checkpoint before.", failure)
        first = first or failure
    assert first is not None, "no checkpoints"
    if not isinstance(first, CheckpointError):
        raise first
    tried = f"None of the {len(checkpoints) - 1} before it can be loaded either. " if len(checkpoints) > 1 else ""
    raise CheckpointError(
        f"{first} {tried}Restore its files, go back to another checkpoint (--rewind-to STEP), or start anew"
        " (--overwrite)."
    ) from first


def _failure(checkpoint: Checkpoint, load: Callable[[Path], None], ranks: "Ranks") -> Exception | None:
    """Returns why the checkpoint cannot be loaded: an error on every rank if there is one on any."""
    for act in (lambda: check_digests(checkpoint.path, ranks.rank, ranks.world_size), lambda: load(checkpoint.path)):
        failure = caught(act)
        if ranks.any(failure is not None):
            return failure or CheckpointError(
                f"Checkpoint {checkpoint.path} could not be loaded: another rank says why."
            )
    return None


def caught(act: Callable[[], object]) -> Exception | None:
    """Returns the error that `act` raises, for all ranks to hear of it."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - all ranks must hear of it; raised again where nothing else is left
        return error
    return None
