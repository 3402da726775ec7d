"""Tries a recipe's rewards on its data before a run starts anything: one call of each of the user's own functions, all
ground truths that a built-in reward is to read, and the special tokens that are to stay in what rewards read.

A call runs in a process of its own under the reward's deadline, as in a worker. It is the operator's own recipe that
names the functions, so these may be imported here.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headway.broker.errors import ConfigError, HeadwayError, UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import definition, import_directory
from headway.broker.user_code.pool import Host
from headway.broker.user_code.protocol import Program
from headway.learner.config import ModelConfig
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import Item
from headway.learner.data.prompts.files import PromptList
from headway.learner.data.texts.messages import Tags, read_prompt
from headway.rollout_workers.config import READERS, RewardConfig
from headway.rollout_workers.decoding import check_kept

from .checks import ROWS
from .data_checks import LOCAL
from .operators import roots_of
from .recipe import Recipe

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
    tries = [(f"rewards[{number}]", reward) for number, reward in enumerate(recipe.rewards)]
    tries = [(where, reward) for where, reward in tries if _is_tried(reward, recipe.prompts.kind, calls=calls)]
    tries = [(where, reward) for where, reward in tries if _is_here(reward, where, say)]
    if not tries:
        return recipe
    if recipe.prompts.kind not in LOCAL:
        say(f"Trying the rewards: the prompts ({recipe.prompts.kind}) are opened first, which may take a while.")
    source, skipped = open_source(recipe.prompts, recipe.run.seed), dict[str, str]()
    for where, reward in tries:
        if ":" in reward.kind:
            asyncio.run(_call(recipe, reward, source.train(0, 0), where))
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


async def _call(recipe: Recipe, config: RewardConfig, item: Item, where: str) -> None:
    """Call a function once. Raises ConfigError where the call fails, or returns no finite number as its score."""
    from headway.rollout_workers.rewards import open_alone

    reward = await open_alone(config.kind, config, roots_of(recipe))
    prompt = _prompt(item)
    try:
        if prompt.messages is not None or recipe.prompts.system_prompt:
            prompt = msgspec.structs.replace(prompt, text=await _rendered(recipe, item) or prompt.text)
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


async def _rendered(recipe: Recipe, item: Item) -> str:
    """Return the text that the model reads; see `_asked`. Raises ConfigError for a row that the chat template refuses,
    and for a template that runs past the deadline."""
    try:
        return await _asked(recipe, "text", item)
    except UserCodeError as error:
        raise ConfigError(f"{item.place}: the prompt cannot be rendered: {error}") from error


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


class Rendering:
    """The model's tokenizer and chat template, in a process that can be killed."""

    places = 1

    def __init__(self, model: dict[str, Any], system_prompt: str) -> None:
        from headway.learner.data.prompts.rendering import Renderer
        from headway.learner.models.model import load_tokenizer

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
    from headway.rollout_workers.rewards import open_alone
    from headway.rollout_workers.rewards.base import ReadsTruths

    reward = await open_alone(config.kind, config, roots_of(recipe))
    assert isinstance(reward, ReadsTruths)
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
