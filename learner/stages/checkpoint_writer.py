"""One checkpoint at a time: begun between two steps, written while training goes on, durable at a later step."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from headway.learner.backends.base import CheckpointPart
from headway.learner.backends.snapshots import SnapshotWriter
from headway.learner.checkpoints.checkpoint import CheckpointStore, LearnerState, seal
from headway.learner.checkpoints.digests import add_digests
from headway.learner.ranks import Ranks


class CheckpointWriter:
    """Writes checkpoints. All calls are collective, and raise CheckpointError on every rank if one cannot write."""

    def __init__(self, store: CheckpointStore, ranks: Ranks, *, asynchronous: bool) -> None:
        self._store = store
        self._ranks = ranks
        self._background = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._begun: tuple[SnapshotWriter, LearnerState] | None = None

    def begin(self, models: Mapping[str, CheckpointPart], state: LearnerState) -> None:
        """Save `models`, each in a folder of its name, as they are now; the one begun before must be durable."""
        assert self._begun is None, "one checkpoint at a time"
        path = self._store.path(state.incarnation, state.step)
        self._begun = SnapshotWriter(self._ranks, path, models, self._background), state

    def look(self) -> int | None:
        """Returns the step whose checkpoint has become durable since the last call, or None; it does not wait."""
        return self.wait() if self._begun and self._begun[0].is_written() else None

    def wait(self) -> int | None:
        """Waits until the checkpoint that was begun is durable, then deletes older ones, and returns its step."""
        if self._begun is None:
            return None
        (saving, state), self._begun = self._begun, None
        saving.finish(partial(seal, state=state))
        if self._ranks.is_first:
            self._tidy(self._store.path(state.incarnation, state.step), self._store.retired())
        return state.step

    def _tidy(self, written: Path, retired: list[Path]) -> None:
        """Deletes old checkpoints beside training, as terabytes take long; the next call deletes any remains."""
        run: Callable[..., object] = self._background.submit if self._background else _call
        for path in retired:
            run(shutil.rmtree, path, ignore_errors=True)
        run(add_digests, written)


def _call(function: Callable[..., object], *arguments: object, **options: object) -> object:
    return function(*arguments, **options)
