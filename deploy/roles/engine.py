"""An engine with the weights of a trained model, for commands that generate with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headway.broker.config import BrokerConfig
from headway.broker.errors import ConfigError
from headway.broker.schema import WeightVersion
from headway.deploy.recipe.checks import check_engine
from headway.deploy.recipe.sections import SOURCE, overridden
from headway.deploy.run.trained import TrainedModel
from headway.learner.backends.adapter import open_weights
from headway.learner.backends.score_head import has_score_head
from headway.learner.config import ModelConfig
from headway.learner.models.end_tokens import end_tokens
from headway.learner.models.model import load_tokenizer
from headway.rollout_workers.config import EngineConfig, EvalConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding, load_decoding
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.samples.held_out import evaluation_sampling
from headway.weightsync.config import WeightsConfig

if TYPE_CHECKING:
    from headway.rollout_workers.engines.base import Engine

WEIGHTS = WeightVersion(0, 0)
"""The name that an engine gets for the weights of the model."""


S = TypeVar("S", bound="OwnSettings")


class OwnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sections of a recipe that decide how a trained model generates."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()


class PoolSettings(OwnSettings, frozen=True, kw_only=True):
    """Those that decide, besides, how workers are started and reach their model and their prompts."""

    workers: WorkersConfig = WorkersConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()


def own_settings(model: TrainedModel, overrides: Sequence[str], temperature: float | None) -> OwnSettings:
    """Return the settings for one engine in this process; see `settings_of`."""
    return settings_of(model, overrides, temperature, OwnSettings)


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


async def open_trained(model: TrainedModel, settings: OwnSettings, seed: int) -> "Engine":
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
