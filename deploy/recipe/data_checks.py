"""Checks a recipe's data files before a server, a stage or a learner is started.

The learner reports errors that need a tokenizer, with the same file and row.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.installation import cache_directory, version_of
from headway.learner.data.examples import open_examples
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import PromptSource
from headway.learner.models.architectures import check_architecture, check_heads
from headway.learner.models.chat_template import read_chat_template
from headway.learner.models.directory import (
    check_config_sizes,
    check_files,
    check_named_tokens,
    check_path,
    lacks_chat_template,
    positions_of,
    read_config,
)
from headway.learner.models.parallel_layout import check_sizes
from headway.learner.stages.registry import check_records

from .adapters import check_targets
from .pools import pools_of
from .recipe import Recipe
from .stage_graph import REFERENCE

LOCAL = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
"""Kinds of data on this machine. Other kinds come from a hub or from the user's own code, which runs where it is
needed."""
SLOW = {"reasoning_gym": "reasoning-gym"}
"""Kinds of data whose package takes seconds to import, and the package's distribution. No process of a run begins
before its data is checked."""


def check_data(recipe: Recipe, *, is_new: bool = False, say: Callable[[str], object] | None = None) -> None:
    """Raise ConfigError, with file and row, if prompts, the warm-up's examples, other records or a chat template cannot
    be read, and for a directory of a run that begins (`is_new`) here: its model's, or its critic's. `say` gets the
    warning of `beyond_positions`."""
    begins_here = is_new and recipe.launcher.kind == "local"
    is_here, critic = begins_here and bool(recipe.model.path), recipe.algorithm.critic.path
    if begins_here and critic and not critic.startswith(REFERENCE):
        check_path(critic, "algorithm.critic.path")
    if recipe.model.random is not None:
        check_config_sizes(recipe.model.random.config, "model.random.config")
    if is_here:  # loading a model takes up to minutes; its directory tells now what it lacks
        check_files(recipe.model.path)
        check_config_sizes(read_config(recipe.model.path) or {}, f"model.path: {recipe.model.path}/config.json")
        check_named_tokens(recipe.model.path)
    check_models(recipe)
    check_targets(recipe)
    if say is not None and (warning := beyond_positions(recipe)):
        say(warning)
    if recipe.model.chat_template:
        read_chat_template(recipe.model.chat_template)
    prompts, seed = recipe.prompts, recipe.run.seed
    if prompts.kind in LOCAL:
        lacks_template = is_here and not recipe.model.chat_template and lacks_chat_template(recipe.model.path)
        told = (prompts, seed, recipe.evaluation.prompts > 0, lacks_template)
        _check(prompts.kind, told, partial(_check_prompts, recipe, lacks_template=lacks_template))
    for phase in chain.from_iterable(stage.phases for stage in recipe.plan):
        if phase.kind in LOCAL:
            _check(phase.kind, (phase, seed), partial(open_examples, phase, seed))
    for number, stage in enumerate(recipe.stages):
        check_records(stage, seed, f"stages[{number}]")


def check_models(recipe: Recipe) -> None:
    """Raise ConfigError for a model, or a critic, that the learner's backend does not train, an engine of the run does
    not run, or whose sizes the learner's layout does not divide, as far as its configuration tells. Configurations that
    this machine does not have yet are judged where they are loaded."""
    learner, random, critic = recipe.learner, recipe.model.random, recipe.algorithm.critic.path
    made = (
        {"model_type": random.architecture, **random.config} if random is not None else read_config(recipe.model.path)
    )
    engines = {recipe.engine.kind, *(pool.recipe.engine.kind for pool in pools_of(recipe))}
    found = [("model", made, engines if recipe.has_learner else {""})]
    if critic and not critic.startswith(REFERENCE):
        found.append(("algorithm.critic.path", read_config(critic), {""}))
    for key, config, kinds in found:
        for kind in sorted(kinds) if config else ():
            check_architecture(config or {}, learner.backend, kind, key)
        check_heads(config or {}, learner.backend, learner.device, recipe.model.dtype, key)
        number_bytes = 4 if recipe.model.dtype == "float32" else 2
        check_sizes(learner.backend, learner.layout, learner.processes, config or {}, number_bytes)


def beyond_positions(recipe: Recipe) -> str:
    """Return a warning if samples may be longer than the texts for which the model was made; "" if not, or if this
    machine does not have the model's configuration yet.

    It is no error: rotary positions go on beyond that, and the run's prompts and responses may all be shorter."""
    model, longest = recipe.model, recipe.engine.max_model_len
    most = positions_of(model.random.config if model.random is not None else read_config(model.path) or {})
    if most is None or longest <= most:
        return ""
    new = recipe.sampling.max_new_tokens
    both = f" and sampling.max_new_tokens (it is {new}) below that" if new >= most else ""
    return (
        f"engine.max_model_len is {longest}, but the model was made for texts of {most} tokens (max_position_embeddings"
        " of its configuration, and rope_scaling). What it writes beyond them is hardly sense, and some engines and"
        f" models fail there. Set engine.max_model_len={most}{both}, or take a model for longer texts."
    )


def _check(kind: str, told: object, check: Callable[[], object]) -> None:
    """Make a check of data of this kind, unless the kind is slow and the check has passed here before. `told`: all of
    the recipe on which it depends. The process that opens the data checks it anyway."""
    passed = _passed(SLOW[kind], told) if kind in SLOW else None
    if passed is not None and os.path.exists(passed):  # False where the user may not look
        return
    check()
    if passed is not None:
        with suppress(OSError):  # the next start then takes some seconds more
            passed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            passed.touch()


def _passed(distribution: str, told: object) -> Path | None:
    """Return the empty file that is there once the check has passed for these versions of the package and of Headway;
    None where there can be none."""
    directory, versions = cache_directory(), (version_of(distribution), version_of("headway"))
    if directory is None or None in versions:
        return None
    digest = blake2b(msgspec.msgpack.encode((versions, told)), digest_size=20).hexdigest()
    return directory / "checked" / digest


def _check_prompts(recipe: Recipe, *, lacks_template: bool) -> None:
    source = open_source(recipe.prompts, recipe.run.seed)
    if lacks_template:
        _check_template(recipe, source)
    if recipe.evaluation.prompts:
        source.held_out(1)


def _check_template(recipe: Recipe, source: PromptSource) -> None:
    item = source.train(0, 0)
    if recipe.prompts.system_prompt or not isinstance(item.content, str):
        what = "prompts.system_prompt is set" if recipe.prompts.system_prompt else f"{item.place} is a list of messages"
        raise ConfigError(
            f"{what}, but {recipe.model.path} has no chat template; give prompts as text, a template"
            " (model.chat_template=FILE), or use a chat model."
        )
