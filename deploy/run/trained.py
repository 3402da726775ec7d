"""The models that runs have trained: the one that a user means by a run or a checkpoint, and the recipe behind it."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.recipe.loading import load_recipe
from headway.deploy.recipe.recipe import Recipe
from headway.learner.checkpoints.checkpoint import CheckpointStore

from .directory import CHECKPOINTS, CONFIG, find_run

BEST = "best"
"""The step of the checkpoint that the recipe's `checkpoint.best` has chosen."""
_LEVELS = 3
"""Folders between a run's directory and a model in it, at most: checkpoints/INCARNATION/step_N."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A directory with a Hugging Face model."""

    path: Path
    """The directory, with links resolved."""
    recipe: Recipe | None
    """The recipe of the run in whose directory the model is; None for a model elsewhere."""


def find_trained(model: str, step: int | str | None = None) -> TrainedModel:
    """Return the model in that directory, or a checkpoint of the run of that directory or name.

    `step` chooses the run's checkpoint: a number, `BEST`, or None for the newest that is whole. Raises ConfigError.
    """
    directory = Path(model)
    if is_model(directory):
        if step is not None:
            raise ConfigError(f"{model} is a model; --step and --best choose among the checkpoints of a run.")
        path = directory.resolve()
        run = next((above for above in path.parents[:_LEVELS] if (above / CONFIG).is_file()), None)
        return TrainedModel(path=path, recipe=None if run is None else original_recipe(run))
    run = _run_of(model)
    return TrainedModel(path=_checkpoint(run, step).resolve(), recipe=original_recipe(run))


def is_model(directory: Path) -> bool:
    """Whether the directory holds a Hugging Face model."""
    return os.path.isfile(directory / "config.json")


def original_recipe(directory: Path) -> Recipe:
    """Return the last recipe of the run in `directory`, even if the directory was moved."""
    recipe = load_recipe(directory / CONFIG)
    place = msgspec.structs.replace(recipe.run, directory=str(directory.parent), name=directory.name)
    return msgspec.structs.replace(recipe, run=place)


def _run_of(model: str) -> Path:
    try:
        return find_run(model)
    except ConfigError as error:
        raise ConfigError(f"{model[:200]!r} is no directory with a config.json, so it is no model. {error}") from error


def _checkpoint(run: Path, step: int | str | None) -> Path:
    root = run / CHECKPOINTS
    if step == BEST:
        if is_model(root / BEST):
            return root / BEST
        raise ConfigError(f"{run} has no best checkpoint: only a recipe with checkpoint.best chooses one.")
    found = {one.state.step: one.path for one in CheckpointStore(root, keep=1).lineage()}
    if not found:
        raise ConfigError(
            f"{run} has no whole checkpoint yet. checkpoint.every_steps says when one is written; a finished stage's"
            f" model is in {run / 'sft'} or below {run / 'stages'}."
        )
    if step is None:
        return found[max(found)]
    if step not in found:
        raise ConfigError(f"{run} has no whole checkpoint at step {step}; --step can be {', '.join(map(str, found))}.")
    return found[int(step)]
