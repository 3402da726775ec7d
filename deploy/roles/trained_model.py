"""The models that runs have trained: the one that a user means by a run or a checkpoint, the recipe behind it, and an
engine with its weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headway.broker.config import BrokerConfig
from headway.broker.errors import ConfigError
from headway.broker.schema import WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import SOURCE, load_recipe, overridden
from headway.deploy.recipe.validate import check_engine
from headway.deploy.run.run_directory import CHECKPOINTS, CONFIG, find_run
from headway.learner.backends.adapter import open_weights
from headway.learner.backends.score_head import has_score_head
from headway.learner.checkpoint import CheckpointStore
from headway.learner.config import ModelConfig
from headway.learner.models.end_tokens import end_tokens
from headway.learner.models.pretrained import load_tokenizer
from headway.rollout_workers.config import EngineConfig, EvalConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding, load_decoding
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.evaluation import evaluation_sampling
from headway.weightsync.config import WeightsConfig

if TYPE_CHECKING:
    from headway.rollout_workers.engines.base import Engine


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


WEIGHTS = WeightVersion(0, 0)
"""The name that an engine gets for the weights of the model."""


S = TypeVar("S", bound="GenerationSettings")


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sections of a recipe that decide how a trained model generates."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()


class PoolSettings(GenerationSettings, frozen=True, kw_only=True):
    """Those that decide, besides, how workers are started and reach their model and their prompts."""

    workers: WorkersConfig = WorkersConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()


def settings_of(model: TrainedModel, overrides: Sequence[str], temperature: float | None, into: type[S]) -> S:
    """Return the settings of the model's run, or the defaults for a model outside of a run's directory, with overrides
    and a temperature, which may be 0. Raises ConfigError, also for a reward model, which generates nothing."""
    if has_score_head(ModelConfig(path=str(model.path))):
        raise ConfigError(
            f"{model.path} is a reward model, which scores text and writes none. Give a policy: a checkpoint of the"
            " run, or the directory that a stage of another kind left."
        )
    recipe = model.recipe
    of_run = into() if recipe is None else into(**{name: getattr(recipe, name) for name in into.__struct_fields__})
    own = overridden(of_run, overrides)
    check_engine(own.engine, f"{SOURCE}: engine")
    sampling = evaluation_sampling(own.sampling, EvalConfig(temperature=temperature))
    return msgspec.structs.replace(own, sampling=sampling)


def own_decoding(model: ModelConfig, sampling: SamplingConfig) -> Decoding:
    """Return what turns tokens of the model in `model.path` into text, with its end tokens."""
    return load_decoding(Path(model.path), end_tokens(load_tokenizer(model)).any, sampling.keep_special_tokens)


async def open_trained(model: TrainedModel, settings: GenerationSettings, seed: int) -> "Engine":
    """Open an engine with the model's weights. Raises HeadwayError; then nothing of the engine is left."""
    tensors = open_weights(str(model.path))
    if tensors is None:
        raise ConfigError(f"{model.path} has no safetensors files.")
    engine = open_engine(settings.engine, model.path, seed=seed)
    try:
        await engine.swap_weights(WEIGHTS, [(name, tensors(name)) for name in sorted(tensors.names)])
    except BaseException:
        await engine.close()
        raise
    return engine
