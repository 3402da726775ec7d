"""The checkpoints of a stage: one at a time, written while training goes on; and the model that a stage leaves.

A checkpoint is begun between two steps, and is durable at a later step. A stage without workers has these directories:

DIRECTORY/                the finished stage: a Hugging Face model, with all that it takes to open the stage again
.DIRECTORY.checkpoints/   the running stage: one checkpoint now and then
"""

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.broker.errors import ConfigError
from headway.learner.backends.base import Backend, CheckpointPart, Snapshot
from headway.learner.backends.hugging_face_files import write_tensors
from headway.learner.backends.snapshots import NamedTensors, SnapshotWriter, snapshot_gathered
from headway.learner.checkpoint import (
    Best,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    LearnerState,
    add_digests,
    load_first,
    read_best,
    read_checkpoint,
    seal,
)
from headway.learner.config import changed_settings
from headway.learner.ranks import Ranks

Binding = Mapping[str, Any]
"""All that decides what a stage trains, as plain data: a stage goes on from checkpoints with the same, and no others.
What may change while it runs is not in it."""


def checkpoints_of(directory: Path) -> Path:
    """Returns where a stage that leaves its model in `directory` keeps its checkpoints."""
    return directory.with_name(f".{directory.name}.checkpoints")


def check_binding(directory: Path, binding: Binding) -> None:
    """Raises ConfigError where the stage of this directory has checkpoints, or has left a model, and was bound to
    something else; the error names what differs."""
    for found in _found(directory, CheckpointStore(checkpoints_of(directory), keep=1)):
        _check_bound(directory, found, binding)


class StageCheckpoints:
    """One stage's checkpoints. All calls are collective; a write that fails raises CheckpointError on every rank."""

    def __init__(self, backend: Backend, ranks: Ranks, directory: Path, binding: Binding, *, every_s: float) -> None:
        """`every_s`: the seconds between checkpoints; a shorter stage writes none."""
        self._backend = backend
        self._ranks = ranks
        self._directory = directory
        self._binding = binding
        self._every_s = every_s
        self._root = checkpoints_of(directory)
        self._best: Best | None = None
        self._store = CheckpointStore(self._root, keep=1)
        self._writer = CheckpointWriter(self._store, ranks, asynchronous=False)
        self._kept_s = time.monotonic()

    @property
    def running_directory(self) -> Path:
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
        """Returns the place last given to `keep` or `leave`, and loads the backend of that time; {} for a new stage.

        Raises ConfigError where the checkpoints are bound to something else, or none of them is whole.
        """
        check_binding(self._directory, self._binding)
        if found := _found(self._directory, self._store):
            return load_first(found, self._backend.load, self._ranks).state.cursor
        if any(self._root.glob("*/step_*")):
            raise ConfigError(
                f"None of the checkpoints in {self._root} is whole, so the stage cannot go on from them. Restore their"
                " files, or remove them to train the stage from its beginning."
            )
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
        models: dict[str, CheckpointPart] = {"": self._backend}
        if getattr(self._backend, "trains_adapter", False):
            models["."] = _ModelWeights(self._backend, self._ranks)
        SnapshotWriter(self._ranks, self._directory, models, None).finish(partial(seal, state=state))
        self._remove()
        return self._directory

    def _remove(self) -> None:
        """Removes the checkpoints; no rank goes on before they are gone."""
        if self._ranks.is_first:
            shutil.rmtree(self._root, ignore_errors=True)
        self._ranks.any(False)

    def _state(self, step: int, place: dict[str, Any]) -> LearnerState:
        return LearnerState(identity=_text_of(self._binding), incarnation=0, step=step, cursor=place)


def _found(directory: Path, store: CheckpointStore) -> list[Checkpoint]:
    """Returns what the stage has left, or else its checkpoints, newest first."""
    try:
        return [read_checkpoint(directory)]
    except CheckpointError:  # nothing is left yet
        return store.lineage()[::-1]


def _check_bound(directory: Path, found: Checkpoint, binding: Binding) -> None:
    text = _text_of(binding)
    if found.state.identity == text:
        return
    before = _read_binding(found.state.identity)
    removed = found.path if found.path == directory else checkpoints_of(directory)
    differs = (
        "an older version of Headway wrote it, and does not say by which settings"
        if before is None
        else ", ".join(
            f"{path} was {was} and is {is_} now" for path, was, is_ in changed_settings("", before, _read_binding(text))
        )
    )
    raise ConfigError(
        f"{found.path} has {found.state.step} trained steps of this stage, made by other settings: {differs}. To go on,"
        f" bring these back. To train the stage from its beginning, remove {removed}."
    )


def _text_of(binding: Binding) -> str:
    return msgspec.json.encode(binding, order="deterministic").decode()


def _read_binding(identity: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(identity, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


class _ModelWeights:
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

    def poll(self) -> int | None:
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
