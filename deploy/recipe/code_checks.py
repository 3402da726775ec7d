"""Looks for the user's own code that a recipe names before a run starts anything, without running any of it.

What only an import can tell is told by the process that imports it.
"""

from headway.broker.user_code.import_paths import definition
from headway.rollout_workers.rewards.functions import check_function

from .recipe import Recipe


def check_code(recipe: Recipe) -> None:
    """Raise ConfigError, with its key, for the first import path that leads to nothing on this machine."""
    for index, reward in enumerate(recipe.rewards):
        if ":" in reward.kind:
            check_function(reward, f"rewards[{index}].kind")
    algorithm = recipe.algorithm
    for key, kind in (
        ("prompts.kind", recipe.prompts.kind),
        ("environment.kind", recipe.environment.kind),
        ("algorithm.advantage.kind", algorithm.advantage.kind),
        ("algorithm.objective.kind", algorithm.objective.kind),
        *((f"algorithm.corrections[{n}].kind", correction.kind) for n, correction in enumerate(algorithm.corrections)),
        *((f"stages[{number}].kind", stage.kind) for number, stage in enumerate(recipe.stages)),
        *((f"sft.phases[{number}].kind", phase.kind) for number, phase in enumerate(recipe.sft.phases)),
    ):
        if ":" in kind:
            definition(kind, key)
