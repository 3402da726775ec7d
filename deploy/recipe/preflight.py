"""Checks what a recipe names before a server, a stage or a learner is started: data files, models, the user's code,
packages, and rewards by a trial call.

The learner reports errors that need a tokenizer, with the same file and row. A trial call runs in a process of its own
under the reward's deadline, as in a worker.
"""

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from headway.broker.errors import CallDeadlineError, ConfigError, HeadwayError, UserCodeError
from headway.broker.installation import cache_directory, version_of
from headway.broker.schema import Prompt
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, definition, import_directory
from headway.broker.user_code.pool import Host, HostLostError
from headway.learner.backends import check_installed as check_backend_installed
from headway.learner.config import ModelConfig
from headway.learner.data.examples import open_examples
from headway.learner.data.messages import Tags, read_prompt
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import Item, PromptSource
from headway.learner.data.prompts.files import PromptList
from headway.learner.models.architectures import check_architecture, check_heads
from headway.learner.models.chat_template import read_chat_template
from headway.learner.models.directory_checks import (
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
from headway.rollout_workers.config import READERS, RewardConfig
from headway.rollout_workers.decoding import check_kept
from headway.rollout_workers.engines import abilities_of, check_installed, check_requirements
from headway.rollout_workers.rewards import check_installed as check_reward_installed
from headway.rollout_workers.rewards.functions import check_function
from headway.rollout_workers.scorers.runtimes import check_installed as check_runtime_installed

from .adapter_support import check_own_engine, check_targets
from .pools import pools_of, scorers_of
from .recipe import Recipe, check_sink_packages
from .stage_graph import REFERENCE
from .trust import check_paths, roots_of
from .validate import ROWS

LOCAL = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
"""Kinds of data on this machine. Other kinds come from a hub or from the user's own code, which runs where it is
needed."""
SLOW = {"reasoning_gym": "reasoning-gym"}
"""Kinds of data whose package takes seconds to import, and the package's distribution. No process of a run begins
before its data is checked."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_start(recipe: Recipe, *, has_workers: bool, is_new: bool, say: Callable[[str], object]) -> None:
    """Raise ConfigError for what this machine lacks of the learner, and of workers and scorers if they start here, too.
    `say` gets warnings. What takes longer, and what changes the recipe, does `tried`."""
    check_packages(recipe, has_workers=has_workers)
    check_data(recipe, is_new=is_new, say=say)
    if has_workers:
        check_scorers(recipe)
        if recipe.launcher.kind == "local":
            check_code(recipe)
            if recipe.agent.kind and recipe.has_learner:
                asyncio.run(check_agent_opens(recipe))


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


def check_scorers(recipe: Recipe) -> None:
    """Raise ConfigError, before anything is started, for a scorer's directory that is not on this machine, where
    `headway run` starts the scorers, or holds no model."""
    for scorer in scorers_of(recipe):
        is_elsewhere = scorer.path.startswith(REFERENCE) or not recipe.scorers.count
        if is_elsewhere or (_HUB_ID.fullmatch(scorer.path) and not Path(scorer.path).exists()):
            continue
        if not (Path(scorer.path).expanduser() / "config.json").is_file():
            raise ConfigError(
                f"{scorer.key}: {scorer.path} is no directory with a model: it has no config.json. Give the directory"
                " of a trained model, a hub id, or stage:NAME."
            )


def check_code(recipe: Recipe) -> None:
    """Raise ConfigError, with its key, for the first import path that leads to nothing on this machine."""
    for index, reward in enumerate(recipe.rewards):
        if ":" in reward.kind:
            check_function(reward, f"rewards[{index}].kind")
    algorithm = recipe.algorithm
    for key, kind in (
        ("prompts.kind", recipe.prompts.kind),
        ("environment.kind", recipe.environment.kind),
        ("agent.kind", recipe.agent.kind),
        ("algorithm.advantage.kind", algorithm.advantage.kind),
        ("algorithm.objective.kind", algorithm.objective.kind),
        *((f"algorithm.corrections[{n}].kind", correction.kind) for n, correction in enumerate(algorithm.corrections)),
        *((f"stages[{number}].kind", stage.kind) for number, stage in enumerate(recipe.stages)),
        *((f"sft.phases[{number}].kind", phase.kind) for number, phase in enumerate(recipe.sft.phases)),
    ):
        if ":" in kind:
            definition(kind, key)


async def check_agent_opens(recipe: Recipe) -> None:
    """Raise ConfigError for an agent that a worker on this machine could not open: its code, its packages, its
    programs or its sandbox are missing, or a server that it plays with does not answer. It is opened in a process of
    its own, as in a worker, and plays nothing."""
    from headway.rollout_workers.agents.external import EXTERNAL, ExternalAgents
    from headway.rollout_workers.agents.hosted import AgentHosts

    if recipe.agent.kind == EXTERNAL:
        ExternalAgents()
        return
    one = msgspec.structs.replace(recipe.agent, processes=1)
    try:
        hosts = await AgentHosts.open(one, roots_of(recipe), checks_servers=True)
    except UserCodeError as error:
        raise ConfigError(f"agent.kind={recipe.agent.kind} cannot be opened: {error}") from error
    await hosts.close()


def check_packages(recipe: Recipe, *, has_workers: bool) -> None:
    """Raise ConfigError if the learner, or a worker on this machine if there are any, lacks a package, would not import
    what the recipe names, or has an engine that cannot do what the recipe asks of it."""
    check_paths(recipe)
    for index, stage in enumerate(recipe.stages):
        if ":" in stage.kind:
            ImportRoots((stage.kind,)).check(stage.kind, f"stages[{index}].kind")
    check_backend_installed(recipe.learner.backend)
    if recipe.model.adapter is not None and recipe.model.adapter.quantize_base != "none":
        from headway.learner.backends.quantization import check_quantizer

        check_quantizer(recipe.model.adapter.quantize_base)
    check_sink_packages(recipe.metrics)
    if has_workers:
        for index, reward in enumerate(recipe.rewards):
            check_reward_installed(reward.kind, f"rewards[{index}].kind")
        if recipe.scorers.count and scorers_of(recipe):
            check_runtime_installed(recipe.scorers.engine.kind)
        for one in (recipe, *(pool.recipe for pool in pools_of(recipe))):
            check_installed(one.engine.kind)
            check_requirements(
                one.engine.kind,
                abilities_of(one.engine, roots_of(one)),
                tells_experts=one.algorithm.router_replay,
                sleeps=one.run.is_colocated,
            )
            check_own_engine(one, roots_of(one))


RESPONSE = "The answer is 42."
"""The response of a trial call."""
RENDER_S = 60.0
"""The deadline for rendering one prompt."""


def tried(recipe: Recipe, say: Callable[[str], object], *, calls: bool = True) -> Recipe:
    """Return the recipe, without the rows that a reward with `unreadable: skip` cannot read; `say` gets their number.
    `calls`: whether functions are called, too, and a source of the user's own and the tokenizer are opened. Functions
    that are not on this machine are left to workers, which `say` is told.

    Raises ConfigError for a function that fails on a trial call, with file and row for a ground truth that a built-in
    reward cannot read, and for special tokens that the model's tokenizer, if it is here, does not have."""
    keeps = recipe.sampling.keep_special_tokens
    if calls and keeps and (complaint := asyncio.run(_asked(recipe, "kept", keeps))):
        raise ConfigError(complaint)
    if calls and recipe.agent.kind and (complaint := asyncio.run(_asked_format(recipe))):
        raise ConfigError(complaint)
    tries = [(f"rewards[{number}]", reward) for number, reward in enumerate(recipe.rewards)]
    tries = [(where, reward) for where, reward in tries if _is_tried(reward, recipe.prompts.kind, calls=calls)]
    tries = [(where, reward) for where, reward in tries if _is_here(reward, where, say)]
    if not tries:
        return recipe
    if recipe.prompts.kind not in LOCAL:
        say(f"Trying the rewards: the prompts ({recipe.prompts.kind}) are opened first, which may take a while.")
    source, skipped = open_source(recipe.prompts, recipe.run.seed), dict[str, str]()
    prompt: Prompt | None = None
    for where, reward in tries:
        if ":" in reward.kind:
            item = source.train(0, 0)
            prompt = prompt or asyncio.run(_trial_prompt(recipe, item))
            asyncio.run(_call(recipe, reward, item, prompt, where))
        else:
            items = source.items if isinstance(source, PromptList) else [source.train(0, 0)]
            skipped |= _unreadable(recipe, reward, items, where)
    return _without(recipe, skipped, source.size, say) if skipped else recipe


def _is_tried(reward: RewardConfig, prompts: str, *, calls: bool) -> bool:
    """Whether anything is tried of the reward, with prompts of this kind. Those that come with Headway are what its
    rewards read; of a source of the user's own the first one is read."""
    if ":" in reward.kind:
        return calls and reward.trial
    return reward.kind in READERS and (prompts in ROWS or (":" in prompts and calls))


def _is_here(reward: RewardConfig, where: str, say: Callable[[str], object]) -> bool:
    """Return whether this machine has the reward; `say` is told of a function that it does not have."""
    if ":" not in reward.kind:
        return True
    try:
        definition(reward.kind, where)
    except ConfigError:
        say(f"{where}.kind: {reward.kind} is not on this machine, so it is not tried before its workers import it.")
        return False
    return True


async def _trial_prompt(recipe: Recipe, item: Item) -> Prompt:
    """Return the prompt of trial calls, as the model reads it. Rendering it starts a process, so all calls share it.
    Raises ConfigError for a row that the chat template refuses, and for a template that runs past the deadline."""
    prompt = _prompt(item)
    if prompt.messages is None and not recipe.prompts.system_prompt:
        return prompt
    try:
        return msgspec.structs.replace(prompt, text=await _asked(recipe, "text", item) or prompt.text)
    except UserCodeError as error:
        raise ConfigError(f"{item.place}: the prompt cannot be rendered: {error}") from error


async def _call(recipe: Recipe, config: RewardConfig, item: Item, prompt: Prompt, where: str) -> None:
    """Call a function once. Raises ConfigError where the call fails, or returns no finite number as its score."""
    from headway.rollout_workers.rewards import open_single

    reward = await open_single(config.kind, config, roots_of(recipe))
    try:
        await reward.score(prompt, RESPONSE, "stop", (0,))
    except ConfigError:
        raise
    except HeadwayError as error:
        row = item.place or f"the first prompt of {recipe.prompts.kind}"
        raise ConfigError(
            f"{where}.kind: {config.kind} fails on a trial call, with {row} and the response {RESPONSE!r}: it"
            f" {error.__cause__ or error}. Mend the function; or, if it is right and cannot be called now,"
            f" {where}.trial=false."
        ) from error
    finally:
        await reward.close()


async def _asked(recipe: Recipe, method: str, argument: object) -> str:
    """Return what `Rendering` says, in a process that loads the model's tokenizer; "" where that is not here yet.
    Raises UserCodeError."""
    program = Program(
        name="model.chat_template",
        factory=f"{__name__}:Rendering",
        arguments={"model": msgspec.to_builtins(recipe.model), "system_prompt": recipe.prompts.system_prompt},
        import_path=str(import_directory()),
    )
    host = Host(program)
    try:
        await host.start()
    except HeadwayError:
        return ""
    try:
        return str(await host.call(method, [argument], RENDER_S))
    finally:
        await host.close()


async def _asked_format(recipe: Recipe) -> str:
    """Return why no format of conversations fits the model; "" where one does, or the tokenizer is not here yet."""
    config = recipe.agent.format
    if ":" in config.kind:  # the user's own reads a model's directory as it likes
        return ""
    try:
        return await _asked(recipe, "lacks_format", [config.kind, dict(config.options)])
    except (CallDeadlineError, HostLostError):  # on a machine that is very busy; workers check it anyway
        return ""
    except UserCodeError as error:
        return f"agent.format.kind={config.kind} cannot be opened: {error}"


class Rendering:
    """The model's tokenizer and chat template, in a process that can be killed."""

    places = 1

    def __init__(self, model: dict[str, Any], system_prompt: str) -> None:
        from headway.learner.data.prompts.rendering import Renderer
        from headway.learner.models.pretrained import load_tokenizer

        self._tokenizer = load_tokenizer(msgspec.convert(model, ModelConfig))
        self._renderer = Renderer(self._tokenizer, system_prompt)

    def text(self, item: Any) -> str:
        """Return an item's prompt as the model reads it."""
        return self._renderer.prompt(msgspec.convert(item, Item), group="trial", num_samples=1).text

    def kept(self, names: Any) -> str:
        """Return why these are no special tokens of the model; "" if they are."""
        try:
            check_kept(self._tokenizer, names)
        except ConfigError as error:
            return str(error)
        return ""

    def lacks_format(self, asked: Any) -> str:
        """Return why the format of conversations of this kind, with these options, does not fit the model; "" if it
        does."""
        from headway.learner.models.end_tokens import end_tokens
        from headway.rollout_workers.agents.formats import open_format
        from headway.rollout_workers.agents.formats.options import AgentFormatOptions

        kind, options = asked
        with TemporaryDirectory(prefix="headway-format-") as directory:
            self._tokenizer.save_pretrained(directory)
            ends = end_tokens(self._tokenizer).any
            try:
                open_format(Path(directory), ends, kind, options=msgspec.convert(options, AgentFormatOptions))
            except ConfigError as error:
                return str(error)
        return ""


def _unreadable(recipe: Recipe, config: RewardConfig, items: Sequence[Item], where: str) -> dict[str, str]:
    """Return the places of the rows that a built-in reward cannot read, with its complaints, if they are to be passed
    over. Raises ConfigError for the first one if they are not."""
    told = asyncio.run(_complaints(recipe, config, [_prompt(item) for item in items]))
    found = {item.place: complaint for item, complaint in zip(items, told, strict=True) if complaint}
    if not found or config.unreadable == "skip":
        return found
    place, complaint = next(iter(found.items()))
    raise ConfigError(
        f"{place}: {complaint}, so {config.kind} cannot judge a response to it ({len(found)} of {len(items)} rows)."
        f" Mend these rows, leave them out, or pass over them: {where}.unreadable=skip."
    )


async def _complaints(recipe: Recipe, config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:
    from headway.rollout_workers.rewards import open_single
    from headway.rollout_workers.rewards.base import GroundTruthReader

    reward = await open_single(config.kind, config, roots_of(recipe))
    assert isinstance(reward, GroundTruthReader)
    try:
        return await reward.complaints(prompts)
    finally:
        await reward.close()


def _without(recipe: Recipe, skipped: dict[str, str], rows: int | None, say: Callable[[str], object]) -> Recipe:
    """Return the recipe with the rows at these places left out."""
    place, complaint = next(iter(skipped.items()))
    say(f"{len(skipped)} of {rows} rows are passed over; the first is {place}: {complaint}.")
    before = recipe.prompts.options.get("skip_rows", ())
    options = {**recipe.prompts.options, "skip_rows": [*before, *skipped]}
    return msgspec.structs.replace(recipe, prompts=msgspec.structs.replace(recipe.prompts, options=options))


def _prompt(item: Item) -> Prompt:
    """Return an item as a prompt. The text of a conversation is not rendered, as that takes the model's tokenizer."""
    content = read_prompt(item.content, item.place, "prompt", Tags())
    return Prompt(
        group="trial",
        token_ids=[0],
        text=content if isinstance(content, str) else str(content),
        messages=None if isinstance(content, str) else content,
        ground_truth=item.ground_truth,
        data_source=item.data_source,
        extra_info=item.extra_info,
        num_samples=1,
    )
