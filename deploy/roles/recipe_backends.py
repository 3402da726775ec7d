"""The backends that a recipe asks for, with their models and fresh optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.learner.backends import abilities_of, open_backend
from headway.learner.backends.base import Backend, ScoreBackend, ValueBackend
from headway.learner.backends.score_head import check_critic
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.batching.router_replay import Routing, routing_of
from headway.learner.config import ModelConfig
from headway.learner.models.architectures import check_architecture, check_heads
from headway.learner.models.pretrained import load_config
from headway.learner.models.shape import ModelShape, shape_of
from headway.learner.objective.composition import gae_options
from headway.learner.objective.critic import Critic
from headway.learner.planning.fsdp import is_replayed
from headway.learner.planning.memory import PlannedModel
from headway.learner.ranks import Ranks


def recipe_backend(recipe: Recipe) -> Backend:
    """Open the policy's backend. Collective over the ranks. Equal recipes give equal weights."""
    recipe_routing(recipe)  # refuses a model that does not fit before it is loaded
    return beside_policy(recipe, recipe.model)


def beside_policy(recipe: Recipe, model: ModelConfig) -> Backend:
    """Open a model on the backend and layout of the policy, such as a teacher. Collective over the ranks."""
    backend: Backend = _open(recipe, model, "policy")
    return backend


def recipe_scores(recipe: Recipe) -> ScoreBackend:
    """Open the backend of a reward model. Collective over the ranks. Equal recipes give equal weights."""
    backend: ScoreBackend = _open(recipe, recipe.model, "score")
    return backend


def _open(recipe: Recipe, model: ModelConfig, head: Literal["policy", "value", "score"]) -> Any:
    """Open a model in this process, which from now on computes with `learner.threads`: every stage and role of the
    learner comes here, however it was started. The configuration of a model from a hub may be here only now."""
    torch.set_num_threads(recipe.learner.threads)
    config = load_config(model).to_dict()
    check_architecture(config, recipe.learner.backend, engine="", key="model")
    check_heads(config, recipe.learner.backend, recipe.learner.device, model.dtype, key="model")
    opened: Any = open_backend  # what it returns is the head's
    return opened(
        recipe.learner.backend,
        model,
        recipe.optimizer,
        device=recipe.learner.device,
        seed=recipe.run.seed,
        layout=recipe.learner.layout,
        compute=recipe.learner.compute,
        head=head,
    )


def recipe_cost(recipe: Recipe) -> CostModel:
    """Return the cost model of the recipe's model on its device, or of a usual one if the model's configuration names
    its sizes otherwise."""
    try:
        shape = shape_of(load_config(recipe.model))
    except AttributeError:
        return DEFAULT_COST
    return CostModel.of_model(shape, recipe.learner.device, is_replayed=_is_replayed(recipe, shape))


def _is_replayed(recipe: Recipe, shape: ModelShape) -> bool:
    """Return whether the policy's kernels are recorded. A model that shares its device with engines drops the records
    whenever these work."""
    learner, model = recipe.learner, recipe.model
    replays = abilities_of(learner.backend).replays_kernels and recipe.run.placement == "separated"
    planned = PlannedModel(shape=shape, learner=learner, dtype=model.dtype)
    adapter = model.adapter
    may_replay = adapter is None or (
        learner.compute.cuda_graphs == "always" and not adapter.dropout and adapter.quantize_base == "none"
    )
    return replays and may_replay and is_replayed(planned)


def recipe_routing(recipe: Recipe) -> Routing | None:
    """Return how the model chooses experts, if choices are replayed. Raises ConfigError if they cannot be replayed."""
    return routing_of(load_config(recipe.model)) if recipe.algorithm.router_replay else None


def recipe_critic(recipe: Recipe, ranks: Ranks) -> Critic:
    """Open the critic of advantage.kind=gae: the reward model that it names, or else the policy's first weights with a
    new head. Collective over the ranks. Raises ConfigError for a reward model that does not fit."""
    algorithm = recipe.algorithm
    model = _critic_model(recipe)
    with _critic_errors(algorithm.critic.path):
        backend: ValueBackend = _open(recipe, model, "value")
    return Critic(
        backend,
        ranks,
        clip=algorithm.critic.clip,
        learning_rate=algorithm.critic.learning_rate,
        **gae_options(algorithm),
    )


@contextmanager
def _critic_errors(path: str) -> Iterator[None]:
    """Name the key of the reward model from which a critic starts, and the remedy, in an error of its backend."""
    try:
        yield
    except ConfigError as error:
        if not path:
            raise
        raise ConfigError(
            f"algorithm.critic.path: {path} cannot be the critic. {error} The critic is split as the policy is, by"
            " learner.layout: give a reward model of one label whose sizes this layout divides, such as one of the"
            " policy's size, or leave the path out."
        ) from error


def _critic_model(recipe: Recipe) -> ModelConfig:
    path = recipe.algorithm.critic.path
    if not path:
        return recipe.model
    model = msgspec.structs.replace(recipe.model, path=path, random=None)
    check_critic(model, recipe.model)
    return model
