"""Checks a recipe's data files before a server, a stage or a learner is started.

The learner reports errors that need a tokenizer, with the same file and row.
"""

from itertools import chain

from broker.errors import ConfigError
from learner.data.examples import open_examples
from learner.data.prompts import open_source
from learner.data.prompts.base import PromptSource
from learner.models.chat_template import read_chat_template
from learner.models.directory import check_files, lacks_chat_template
from learner.stages.kinds import check_records

from .recipe import Recipe

LOCAL = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
"""Kinds of data on this machine. Other kinds come from a hub or from the user's own code, which runs where it is
needed."""


def check_data(recipe: Recipe, *, is_new: bool = False) -> None:
    """Raise ConfigError, with file and row, if prompts, the warm-up's examples, other records or a chat template cannot
    be read, and for the model's directory of a run that begins (`is_new`) here."""
    is_here = is_new and recipe.launcher.kind == "local" and bool(recipe.model.path)
    if is_here:  # loading a model takes up to minutes; its directory tells now what it lacks
        check_files(recipe.model.path)
    if recipe.model.chat_template:
        read_chat_template(recipe.model.chat_template)
    if recipe.prompts.kind in LOCAL:
        source = open_source(recipe.prompts, recipe.run.seed)
        if is_here:
            _check_template(recipe, source)
        if recipe.evaluation.prompts:
            source.held_out(1)
    for phase in chain.from_iterable(stage.phases for stage in recipe.plan):
        if phase.kind in LOCAL:
            open_examples(phase, recipe.run.seed)
    for number, stage in enumerate(recipe.stages):
        check_records(stage, recipe.run.seed, f"stages[{number}]")


def _check_template(recipe: Recipe, source: PromptSource) -> None:
    if recipe.model.chat_template or not lacks_chat_template(recipe.model.path):
        return
    item = source.train(0, 0)
    if recipe.prompts.system_prompt or not isinstance(item.content, str):
        what = "prompts.system_prompt is set" if recipe.prompts.system_prompt else f"{item.place} is a list of messages"
        raise ConfigError(
            f"{what}, but {recipe.model.path} has no chat template; give prompts as text, a template"
            " (model.chat_template=FILE), or use a chat model."
        )
