"""The checkpoints of a stage that trains without workers, and the model that it leaves.

DIRECTORY/                the finished stage: a Hugging Face model, with all that it takes to open the stage again
.DIRECTORY.checkpoints/   the running stage: one checkpoint now and then
"""

import logging
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from learner.backends.base import Backend, Snapshot, Stored
from learner.backends.hugging_face_files import write_tensors
from learner.backends.saving import NamedTensors, Saving, snapshot_gathered
from learner.checkpoints.best import Best, read_best
from learner.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    LearnerState,
    read_checkpoint,
    seal,
)
from learner.checkpoints.resumption import load_first
from learner.ranks import Ranks

from .checkpoint_writer import CheckpointWriter

log = logging.getLogger(__name__)


def checkpoints_of(directory: Path) -> Path:
    """Returns where a stage that leaves its model in `directory` keeps its checkpoints."""
    return directory.with_name(f".{directory.name}.checkpoints")


class StageCheckpoints:
    """One stage's checkpoints. All calls are collective; a write that fails raises CheckpointError on every rank."""

    def __init__(self, backend: Backend, ranks: Ranks, directory: Path, identity: str, *, every_s: float) -> None:
        """`identity` stands for all that decides the stage's model; checkpoints of another identity are removed.
        `every_s`: the seconds between checkpoints; a shorter stage writes none."""
        self._backend = backend
        self._ranks = ranks
        self._directory = directory
        self._identity = identity
        self._every_s = every_s
        self._root = checkpoints_of(directory)
        self._best: Best | None = None
        self._store = CheckpointStore(self._root, keep=1)
        self._writer = CheckpointWriter(self._store, ranks, asynchronous=False)
        self._kept_s = time.monotonic()

    @property
    def beside(self) -> Path:
        """The directory of the checkpoints, for files that a stage needs as long as it runs. `load` of a new stage and
        `leave` remove it."""
        return self._root

    def prefer(self, best: tuple[str, Literal["max", "min"]] | None, keep_last: int = 1) -> None:
        """Keeps the newest `keep_last` checkpoints, and the best of those of `keep_measured` by (metric, mode). Called
        before `load`."""
        self._best = Best(self._root, *best) if best is not None else None
        self._store = CheckpointStore(self._root, keep=keep_last, best=self._best)
        self._writer = CheckpointWriter(self._store, self._ranks, asynchronous=False)

    def load(self) -> dict[str, Any]:
        """Returns the place last given to `keep` or `leave`, and loads the backend of that time; {} for a new stage."""
        found = [each for each in self._found() if each.state.identity == self._identity]
        if found:
            return load_first(found, self._backend.load, self._ranks).state.cursor
        self._remove()
        return {}

    def keep_if_due(self, step: int, place: dict[str, Any]) -> None:
        """Calls `keep` if the last checkpoint is older than `every_s`."""
        if self._ranks.any(time.monotonic() >= self._kept_s + self._every_s):
            self.keep(step, place)

    def keep(self, step: int, place: dict[str, Any]) -> None:
        """Writes the backend and `place` for `load`. `step` must grow from call to call."""
        self._writer.begin({"": self._backend}, self._state(step, place))
        self._writer.wait()
        self._kept_s = time.monotonic()

    def keep_measured(self, step: int, place: dict[str, Any], metrics: Mapping[str, float]) -> None:
        """Calls `keep` with what was measured of this model."""
        assert self._best is not None, "`prefer` says by what"
        self._best.note(step, metrics)
        self.keep(step, place)

    def load_best(self) -> int | None:
        """Loads the model of the best checkpoint, and returns its step; None, and nothing is loaded, where there is
        none."""
        best = read_best(self._root)
        if best is None:
            return None
        self._backend.load(self._store.path(best.incarnation, best.step))
        return best.step

    def leave(self, step: int, place: dict[str, Any]) -> Path:
        """Writes both as the finished stage, removes its checkpoints, and returns the model's directory. An adapter is
        merged into the model there, from which the next stage starts."""
        state = self._state(step, place)
        models: dict[str, Stored] = {"": self._backend}
        if getattr(self._backend, "trains_adapter", False):
            models["."] = _WholeWeights(self._backend, self._ranks)
        Saving(self._ranks, self._directory, models, None).finish(partial(seal, state=state))
        self._remove()
        return self._directory

    def _found(self) -> list[Checkpoint]:
        """Returns the checkpoints, newest first."""
        try:
            return [read_checkpoint(self._directory)]
        except CheckpointError:  # nothing is left yet
            return self._store.lineage()[::-1]

    def _remove(self) -> None:
        """Removes the checkpoints; no rank goes on before they are gone."""
        if self._ranks.is_first:
            shutil.rmtree(self._root, ignore_errors=True)
        self._ranks.any(False)

    def _state(self, step: int, place: dict[str, Any]) -> LearnerState:
        return LearnerState(identity=self._identity, incarnation=0, step=step, cursor=place)


class _WholeWeights:
    """The whole weights of a model whose checkpoints hold an adapter. Its files join those of the checkpoint."""

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self._backend = backend
        self._ranks = ranks

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Returns the writer of the weights' files."""
        write = partial(_write_weights, directory) if self._ranks.is_first else None
        return Snapshot((snapshot_gathered(self._backend.named_tensors(), write, is_copied=is_copied),))

    def load(self, directory: Path) -> None:
        """Does nothing: the checkpoint has all that a backend loads."""


def _write_weights(directory: Path, tensors: NamedTensors) -> None:
    write_tensors(tensors, directory)
