"""The backends that a recipe asks for, with their models and fresh optimizers."""

from deploy.recipe.recipe import Recipe
from learner.backends import open_backend
from learner.backends.base import Backend, ScoreBackend
from learner.models.model import load_config
from learner.objective.composition import gae_options
from learner.objective.critic import Critic
from learner.ranks import Ranks
from learner.rows.routing import Routing, routing_of


def recipe_backend(recipe: Recipe) -> Backend:
    """Open the policy's backend. Collective over the ranks. Equal recipes give equal weights."""
    recipe_routing(recipe)  # refuses a model that does not fit before it is loaded
    return open_backend(
        recipe.learner.backend,
        recipe.model,
        recipe.optimizer,
        device=recipe.learner.device,
        seed=recipe.run.seed,
        layout=recipe.learner.layout,
        compute=recipe.learner.compute,
    )


def recipe_scores(recipe: Recipe) -> ScoreBackend:
    """Open the backend of a reward model. Collective over the ranks. Equal recipes give equal weights."""
    return open_backend(
        recipe.learner.backend,
        recipe.model,
        recipe.optimizer,
        device=recipe.learner.device,
        seed=recipe.run.seed,
        layout=recipe.learner.layout,
        compute=recipe.learner.compute,
        head="score",
    )


def recipe_routing(recipe: Recipe) -> Routing | None:
    """Return how the model chooses experts, if choices are replayed. Raises ConfigError if they cannot be replayed."""
    return routing_of(load_config(recipe.model)) if recipe.algorithm.router_replay else None


def recipe_critic(recipe: Recipe, ranks: Ranks) -> Critic:
    """Open the critic of advantage.kind=gae, which starts from the same weights. Collective over the ranks."""
    algorithm = recipe.algorithm
    return Critic(
        open_backend(
            recipe.learner.backend,
            recipe.model,
            recipe.optimizer,
            device=recipe.learner.device,
            seed=recipe.run.seed,
            layout=recipe.learner.layout,
            compute=recipe.learner.compute,
            head="value",
        ),
        ranks,
        clip=algorithm.critic.clip,
        learning_rate=algorithm.critic.learning_rate,
        **gae_options(algorithm),
    )
