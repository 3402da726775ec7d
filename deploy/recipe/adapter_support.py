"""Finds contradictions between an adapter, the stages that train it and the backend."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from headway.broker.errors import LASTING_EXIT, ConfigError, HeadwayError
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, import_directory
from headway.broker.user_code.pool import BlockingHost
from headway.learner.backends import adapter_base_problem
from headway.learner.config import ModelConfig
from headway.learner.models.directory_checks import read_config
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import abilities_of as engine_abilities
from headway.rollout_workers.engines.abilities import Adapted, gpus_with

from .pools import pools_of
from .recipe import Recipe
from .stage_graph import chain_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_HELD = 8
"""Adapters that an engine holds at most: each takes memory of the device, and a place in every batch's kernels."""

BUILD_S = 120.0
"""The deadline for building a model without its weights."""

_OF_EXPERTS = "a model without experts, or on sglang model.adapter.targets of attention alone, "

OTHERWISE = "Set weights.adapter=merged, which sends whole weights, or change that."


class UnfitEngineError(ConfigError):
    """A worker's own engine does not take what the run sends."""

    exit_code = LASTING_EXIT


def adapter_rank(recipe: Recipe, config: "PretrainedConfig") -> int:
    """Return the rank of the adapters that the run's versions carry alone, for this model; 0: whole weights. Raises
    ConfigError if they are to carry them alone, or samples to finish with theirs, and cannot."""
    adapter, adapted = recipe.model.adapter, adapted_by(recipe, config)
    for complaint in _impossible_sending(recipe, adapted):
        raise ConfigError(complaint)
    return adapter.rank if adapter and sends_adapter(recipe, adapted) else 0


def adapted_by(recipe: Recipe, config: "PretrainedConfig") -> Adapted:
    """Return what the run's adapter changes of this model; of a run without one, what it could change. Raises
    ConfigError for a target that the model does not have."""
    from headway.learner.models.lora import changes_attention_alone
    from headway.learner.models.pretrained import unfilled
    from headway.learner.models.shape import num_experts

    adapter = recipe.model.adapter
    if not num_experts(config):
        return "dense"
    if adapter is None or not adapter.targets:
        return "experts"
    return "attention" if changes_attention_alone(unfilled(config), adapter) else "experts"


def adapters_held(recipe: Recipe) -> int:
    """Return how many versions of an adapter an engine holds. Samples that it runs are of `max_lag + 1` at most."""
    return min(recipe.staleness.max_lag + 1, MOST_HELD) if recipe.weights.kv_policy == "finish" else 1


def sends_adapter(recipe: Recipe, adapted: Adapted) -> bool:
    """Return whether the run's versions carry the adapter alone: all of its engines must take them."""
    return recipe.model.adapter is not None and not why_merged(recipe, adapted)


def why_merged(recipe: Recipe, adapted: Adapted) -> str:
    """Return why versions of a run that trains an adapter carry merged weights; "" if they carry the adapter alone.

    A user's own engine may be known where its worker runs alone, and all processes must decide alike. So it is not
    asked here: `weights.adapter=alone` says that it takes adapters, and each worker asks its own.
    """
    if recipe.weights.adapter == "merged":
        return "weights.adapter is merged"
    if recipe.weights.staging == "none":
        return "weights.staging is none"
    if recipe.run.is_colocated:
        return "run.placement is colocated"
    own = [engine for engine in _engines(recipe) if ":" in engine.kind]
    if own and recipe.weights.adapter == "auto":
        return f"the engine {own[0].kind} is your own, which gets adapters by weights.adapter=alone"
    return next(filter(None, (_why_not(engine, adapted) for engine in _engines(recipe) if engine not in own)), "")


def check_own_engine(recipe: Recipe, roots: ImportRoots) -> None:
    """Raise ConfigError if adapters alone are sent to an engine that takes none, of whatever model. A user's own engine
    is imported to ask it."""
    if recipe.model.adapter is None or recipe.weights.adapter != "alone":
        return
    if why := _why_not(recipe.engine, "dense", roots):
        raise ConfigError(f"weights.adapter is alone, and {why}. {OTHERWISE}")


def _engines(recipe: Recipe) -> list[EngineConfig]:
    return [recipe.engine, *(pool.recipe.engine for pool in pools_of(recipe))]


def _why_not(engine: EngineConfig, adapted: Adapted, roots: ImportRoots | None = None) -> str:
    """Return why an engine does not take adapters alone; "" if it does. A user's own is asked if `roots` are given."""
    abilities = engine_abilities(engine, roots)
    if not abilities.takes_adapters:
        return f"the engine {engine.kind} takes no adapters"
    if adapted != "dense" and not abilities.takes_expert_adapters:
        if not abilities.takes_attention_adapters:
            return f"the engine {engine.kind} takes no adapters of models with experts"
        if adapted != "attention":
            return f"the engine {engine.kind} takes adapters of attention alone, of models with experts"
    dtype = engine.options.get("dtype", engine.dtype)
    if not (abilities.takes_full_adapters or engine.device == "cpu" or dtype != "float32"):
        return f"the engine {engine.kind} takes no adapters in float32 on a GPU"
    proved = abilities.splits_adapters_by if engine.device == "cpu" else ()  # no run on GPUs has shown it
    unproved = [option for option in abilities.gpu_options if option not in proved]
    if (count := gpus_with(engine.options, unproved, "engine.options")) != 1:
        named = [option for option in unproved if engine.options.get(option, 1) != 1]
        return f"an engine has {count} GPUs by {' and '.join(named)}"
    return ""


def rank_for_worker(
    recipe: Recipe, engine: EngineConfig, config: "PretrainedConfig", roots: ImportRoots | None = None
) -> int:
    """Return the rank of the adapters that a worker of the run will be sent; 0: whole weights.

    `recipe` is the run's own, `engine` the worker's, which may be another than the run's recipe names; `roots`: the
    modules below which it may be imported. Raises UnfitEngineError if it does not take what all others are sent.
    """
    rank = adapter_rank(recipe, config)
    if rank and (why := _why_not(engine, adapted_by(recipe, config), roots)):
        raise UnfitEngineError(
            f"The versions of run {recipe.run.name} carry an adapter alone, and this worker's engine ({engine.kind})"
            f" takes whole weights of this model alone: {why}. Start the worker with an engine that takes them"
            f" (the run's recipe names {recipe.engine.kind}), or go on with merged weights: --resume"
            " weights.adapter=merged."
        )
    if rank and recipe.weights.kv_policy == "finish" and not engine_abilities(engine, roots).holds_adapters:
        raise UnfitEngineError(
            f"Run {recipe.run.name} has weights.kv_policy=finish, and this worker's engine ({engine.kind}) holds one"
            f" adapter at a time. Start the worker with one that holds several (the run's recipe names"
            f" {recipe.engine.kind})."
        )
    return rank


def _impossible_sending(recipe: Recipe, adapted: Adapted) -> Iterator[str]:
    """Yield what keeps versions from carrying the adapter alone where they must, and the samples of a run from
    finishing with the adapter that they began with."""
    must = recipe.weights.adapter == "alone" and recipe.model.adapter is not None
    if must and (why := why_merged(recipe, adapted)):
        yield f"weights.adapter is alone, and {why}. {OTHERWISE}"
    if recipe.weights.kv_policy != "finish" or (
        sends_adapter(recipe, adapted)
        and all(":" in engine.kind or engine_abilities(engine).holds_adapters for engine in _engines(recipe))
    ):
        return
    yield (
        "weights.kv_policy is finish, which needs versions that carry an adapter alone and engines that hold several"
        " (model.adapter, engine.kind=vllm without pipeline stages, or sglang on one GPU,"
        f" {_OF_EXPERTS * (adapted != 'dense')}"
        "weights.adapter=auto, weights.staging other than none, run.placement=separated). Set it to recompute."
    )


def check_targets(recipe: Recipe) -> None:
    """Raise ConfigError for a target of the adapter that the model lacks, as far as its configuration is here. The
    model is built without its weights, in a process of its own: that takes seconds and hundreds of megabytes."""
    adapter, model = recipe.model.adapter, recipe.model
    if adapter is None or not (adapter.targets or adapter.dropout) or not (model.random or read_config(model.path)):
        return
    program = Program(
        name="model.adapter.targets",
        factory=f"{__name__}:WeightlessModel",
        arguments={"model": msgspec.to_builtins(model)},
        import_path=str(import_directory()),
    )
    try:
        complaint = BlockingHost(program, deadline_s=BUILD_S).call("complaint")
    except HeadwayError:  # the learner will say what is wrong with the model
        return
    if complaint:
        raise ConfigError(complaint)


class WeightlessModel:
    """A model without its weights, in a process of its own."""

    places = 1

    def __init__(self, model: dict[str, Any]) -> None:
        from headway.learner.models.pretrained import load_config, unfilled

        self._config = msgspec.convert(model, ModelConfig)
        self._model = unfilled(load_config(self._config))

    def complaint(self) -> str:
        """Return what the adapter asks of the model that this does not have; "" if it has all."""
        from headway.learner.models.lora import targets_of

        assert self._config.adapter is not None
        try:
            targets_of(self._model, self._config.adapter)
        except ConfigError as error:
            return str(error)
        return ""


def impossible_adapters(recipe: Recipe) -> Iterator[str]:
    """Yield what a recipe with `model.adapter` contradicts."""
    adapter, plan = recipe.model.adapter, recipe.plan
    yield from _impossible_sending(recipe, "dense")
    if adapter is None:
        return
    if complaint := adapter_base_problem(recipe.learner.backend, adapter, recipe.learner.compute):
        yield complaint
    known = {stage.name: stage for stage in plan}
    for name in adapter.stages:
        if name not in known:
            yield f"model.adapter.stages names {name!r}, and the recipe's stages are {', '.join(known)}."
        elif known[name].kind == "reward_model":
            yield f"model.adapter.stages names {name!r}, and a reward model is always trained whole. Leave it out."
    for number, stage in enumerate(plan):
        if stage.is_left_out or recipe.adapter_in(stage) is None:
            continue
        if stage.has_workers and adapter.dropout:
            yield (
                f"model.adapter.dropout is {adapter.dropout:g}, and stage {stage.name} compares logprobs, which would"
                " then differ by chance. Set it to 0, or leave the stage out of model.adapter.stages."
            )
        trained = [one for one in chain_of(plan, number)[:-1] if not plan[one].is_left_out]
        if recipe.model.random is not None and not trained:
            yield (
                f"model.adapter changes a trained model, and stage {stage.name} starts from random weights. Set"
                " model.path, or let a stage before it train the whole model (model.adapter.stages)."
            )
