"""Where a stage that trains without workers was when it was stopped or killed, and the model that it leaves.

DIRECTORY/                what the stage leaves: a Hugging Face model, with all that it takes to open the stage again
.DIRECTORY.checkpoints/   while it runs: one checkpoint now and then
"""

import logging
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from learner.backends.base import Backend
from learner.backends.saving import Saving
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

EVERY_S = 60.0
"""A stage that is killed repeats about so much; one that is done sooner writes none."""

log = logging.getLogger(__name__)


def checkpoints_of(directory: Path) -> Path:
    """Where a stage that leaves its model in `directory` keeps its checkpoints."""
    return directory.with_name(f".{directory.name}.checkpoints")


class StageCheckpoints:
    """Of one stage. All calls are collective; those that write raise CheckpointError on every rank if one cannot."""

    def __init__(
        self, backend: Backend, ranks: Ranks, directory: Path, identity: str, *, every_s: float = EVERY_S
    ) -> None:
        """`identity`: of all that decides what the stage makes; checkpoints of another one are removed."""
        self._backend = backend
        self._ranks = ranks
        self._directory = directory
        self._identity = identity
        self._every_s = every_s
        self._root = checkpoints_of(directory)
        self._store = CheckpointStore(self._root, keep=1)
        self._writer = CheckpointWriter(self._store, ranks, asynchronous=False)
        self._kept_s = time.monotonic()

    def load(self) -> dict[str, Any]:
        """What `keep` or `leave` was told last, with the backend as it was then; empty where the stage begins."""
        found = [each for each in self._found() if each.state.identity == self._identity]
        if found:
            return load_first(found, self._backend.load, self._ranks).state.cursor
        self._remove()
        return {}

    def keep_if_due(self, step: int, place: dict[str, Any]) -> None:
        """`keep`, where the last one was long ago."""
        if self._ranks.any(time.monotonic() >= self._kept_s + self._every_s):
            self.keep(step, place)

    def keep(self, step: int, place: dict[str, Any]) -> None:
        """Write the backend and `place`, for `load`; `step` grows."""
        self._writer.begin({"": self._backend}, self._state(step, place))
        self._writer.wait()
        self._kept_s = time.monotonic()

    def leave(self, step: int, place: dict[str, Any]) -> Path:
        """Write both as what the stage leaves, and remove its checkpoints; the directory of the model."""
        state = self._state(step, place)
        Saving(self._ranks, self._directory, {"": self._backend}, None).finish(partial(seal, state=state))
        self._remove()
        return self._directory

    def _found(self) -> list[Checkpoint]:
        """Newest first."""
        try:
            return [read_checkpoint(self._directory)]
        except CheckpointError:  # nothing is left yet
            return self._store.lineage()[::-1]

    def _remove(self) -> None:
        """No rank goes on before they are gone."""
        if self._ranks.is_first:
            shutil.rmtree(self._root, ignore_errors=True)
        self._ranks.any(False)

    def _state(self, step: int, place: dict[str, Any]) -> LearnerState:
        return LearnerState(identity=self._identity, incarnation=0, step=step, cursor=place)
