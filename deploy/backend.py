"""The backend that a recipe asks for, with its model and a fresh optimizer."""

from learner.backends import open_backend
from learner.backends.base import Backend

from .recipe import Recipe


def recipe_backend(recipe: Recipe) -> Backend:
    """Collective over the ranks. Equal recipes give equal weights."""
    return open_backend(
        recipe.learner.backend,
        recipe.model,
        recipe.optimizer,
        device=recipe.learner.device,
        seed=recipe.run.seed,
    )
