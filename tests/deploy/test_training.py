"""The learner's role gives the broker its rules from the recipe."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.learner import rules_of
from headway.deploy.roles.recipe_backends import beside_policy, recipe_backend, recipe_critic, recipe_scores
from headway.learner.ranks import Ranks


def open_critic(recipe: Recipe) -> object:
    """Open the critic as a learner of one rank does."""
    return recipe_critic(recipe, Ranks(rank=0, world_size=1, replica=0, replicas=1, is_lead=True))


def open_teacher(recipe: Recipe) -> object:
    """Open another model beside the policy."""
    return beside_policy(recipe, recipe.model)


def test_every_rule_but_the_scorers_is_the_setting_of_the_same_name() -> None:
    overrides = {
        "staleness.max_lag": 7,
        "staleness.ahead": 1.5,
        "staleness.on_straggler": "trim",
        "staleness.min_group_size": 3,
        "staleness.on_over_bound": "mask",
        "learner.groups_per_step": 5,
        "broker.max_bytes": 1234567,
        "broker.max_leases_per_worker": 11,
        "broker.replicas": 2,
        "broker.lease_ttl_s": 12.0,
        "broker.lease_hold_s": 900.0,
        "workers.segment_s": 4.0,
    }
    rules = rules_of(load_recipe("arithmetic.yaml", [f"{name}={value}" for name, value in overrides.items()]))
    told = {name.partition(".")[2]: value for name, value in overrides.items()}
    assert {**told, "scorers": ""} == msgspec.structs.asdict(rules)


def test_replay_for_a_model_without_experts_is_refused_before_it_is_loaded() -> None:
    recipe = load_recipe("arithmetic-dense.yaml", ["algorithm.router_replay=true"])
    with pytest.raises(ConfigError, match="replays the choice of experts, and this qwen3 has none"):
        recipe_backend(recipe)


EVERY_MODEL = pytest.mark.parametrize("open_one", [recipe_backend, recipe_scores, open_critic, open_teacher])


@EVERY_MODEL
def test_every_model_of_the_learner_comes_with_its_threads(
    open_one: Callable[[Recipe], object], torch_threads: None
) -> None:
    torch.set_num_threads(1)
    open_one(load_recipe("arithmetic-dense.yaml", ["learner.threads=3", "algorithm.preset=ppo"]))
    assert torch.get_num_threads() == 3


@EVERY_MODEL
def test_a_model_that_would_train_wrongly_is_refused_by_name_where_it_is_opened(
    open_one: Callable[[Recipe], object], torch_threads: None
) -> None:
    bloom = "model.random.config={hidden_size: 32, n_layer: 1, n_head: 2}"
    recipe = load_recipe("arithmetic-dense.yaml", ["model.random.architecture=bloom", bloom, "algorithm.preset=ppo"])
    with pytest.raises(ConfigError, match="cannot train bloom"):
        open_one(recipe)
