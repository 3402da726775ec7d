"""What a recipe's data files say wrong, asked before a server, a stage or a learner is started.

What takes a tokenizer to know is told by the learner, with the same file and row.
"""

from itertools import chain

from learner.data.examples import open_examples
from learner.data.prompts import open_source

from .recipe import Recipe

LOCAL = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
"""The others are of a hub, or the user's own code, which runs where it is wanted."""


def check_data(recipe: Recipe) -> None:
    """Raise ConfigError, with file and row, where prompts or the warm-up's examples cannot be had."""
    if recipe.prompts.kind in LOCAL:
        source = open_source(recipe.prompts, recipe.run.seed)
        if recipe.evaluation.prompts:
            source.held_out(1)
    for phase in chain.from_iterable(stage.phases for stage in recipe.plan):
        if phase.kind in LOCAL:
            open_examples(phase, recipe.run.seed)
