"""Renders items to prompts that the broker carries, by chat templates and tokenization."""

import logging
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt
from headway.learner.data.messages import (
    NOTHING,
    Content,
    Tags,
    TemplateInputs,
    check_sendable,
    is_begun,
    read_prompt,
)
from headway.learner.data.tokenization import ChatTemplate, Continuation, TextTokens, refuse_for_text
from headway.learner.models.end_tokens import end_tokens

from .base import Item, Message, PromptSource
from .files import PromptList

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 10_000
"""The number of rows rendered by a check: half a second with 20 tokens in each, eight seconds with 1,000."""
LONGEST_ROWS = 100
"""The number of the longest rows that a check renders besides."""

MAKE_ROOM = "Raise engine.max_model_len, lower sampling.max_new_tokens, or shorten them."

log = logging.getLogger(__name__)


class Renderer:
    """Renders messages by the tokenizer's chat template, and text as it is."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str = "") -> None:
        """With a `system_prompt`, text becomes a conversation, too: system, then user."""
        self.template, self.texts = ChatTemplate(tokenizer), TextTokens(tokenizer)
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        if system_prompt and not self.template.is_there:
            raise ConfigError(
                "prompts.system_prompt is set, but the model's tokenizer has no chat template; "
                "put the instruction into the prompts, give a template (model.chat_template=FILE), or use a chat model."
            )

    def prompt(self, item: Item, *, group: str, num_samples: int) -> Prompt:
        """Returns the tokenized prompt, named `group`. Raises ConfigError where nothing is left to continue."""
        what = f"{item.place}: the prompt" if item.place else f"prompt {group} of {item.data_source!r}"
        check_sendable(item, what)
        given = TemplateInputs(tools=item.tools, chat_template_kwargs=item.chat_template_kwargs)
        content = read_prompt(item.content, item.place or what, "prompt", Tags())
        text, token_ids = self.render(content, what, given)
        if not token_ids:
            raise ConfigError(f"{what} has no tokens: {text[:80]!r}.")
        return Prompt(
            group=group,
            token_ids=token_ids,
            text=text,
            messages=content if isinstance(content, list) else None,
            ground_truth=item.ground_truth,
            data_source=item.data_source,
            extra_info=item.extra_info,
            num_samples=num_samples,
        )

    def render(self, content: Content, what: str, given: TemplateInputs = NOTHING) -> tuple[str, list[int]]:
        """Returns the text that the model gets, and its tokens. Errors name `what`."""
        if isinstance(content, str) and not self._system_prompt:
            refuse_for_text(given, what)
            return content, self.texts.beginning(content, what)
        text = self.template.text(self._messages(content), what, opens_answer=True, given=given)
        return text, self.texts.plain(text, what)  # the template has written the special tokens already

    def completed(self, prompt: str, completion: str, what: str, given: TemplateInputs = NOTHING) -> Continuation:
        """Returns the tokens of a prompt that is text, and of a completion of it."""
        text, token_ids = self.render(prompt, f"{what}: the prompt", given)
        return self.texts.continued(token_ids, text, completion, f"{what}: the completion")

    @property
    def end_of_text(self) -> int:
        """The token that ends an answer to a prompt that is text, and thus of a turn if it is made a conversation."""
        ends = end_tokens(self._tokenizer)
        return ends.turn if self._system_prompt else ends.text

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer in a conversation."""
        return end_tokens(self._tokenizer).turn

    def _messages(self, content: Content) -> list[Message]:
        if isinstance(content, list):
            return content
        return [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": content}]


class Prompts:
    """A source with a renderer: prompts as tokens, at random access."""

    def __init__(self, source: PromptSource, renderer: Renderer) -> None:
        self._source = source
        self._renderer = renderer

    @property
    def size(self) -> int | None:
        """The number of prompts in an epoch; None for an endless source."""
        return self._source.size

    @property
    def digest(self) -> str:
        """Differs for rows that say anything else, or stand in another order; empty where a source is no list."""
        return self._source.digest if isinstance(self._source, PromptList) else ""

    def train(self, epoch: int, position: int, *, group: str, num_samples: int) -> Prompt:
        """Returns the training prompt at that place, to be sampled `num_samples` times under the name `group`."""
        item = self._source.train(epoch, position)
        return self._renderer.prompt(item, group=group, num_samples=num_samples)

    def check(self, max_tokens: int | None = None, rows: int = CHECKED_ROWS) -> None:
        """Renders the first rows of a finite source, and the longest ones. Raises ConfigError for a row that would
        later end the run, and if all are longer than `max_tokens`; logs how many are, and the longest."""
        if not isinstance(self._source, PromptList):
            return
        items = [self._source.train(0, position) for position in range(self._source.size)]
        others = sorted(items[rows:], key=lambda item: len(str(item.content)), reverse=True)[:LONGEST_ROWS]
        checked = items[:rows] + others
        lengths = [len(self._renderer.prompt(item, group="check", num_samples=1).token_ids) for item in checked]
        is_left = _told_fitting(checked, lengths, max_tokens, "prompts that were rendered")
        if begun := [item for item in checked if is_begun(item.content)]:
            log.warning(
                "%d of %d prompts end with an assistant's message, with which the model goes on. The first is %s.",
                len(begun),
                len(checked),
                begun[0].place,
            )
        if checked and not any(is_left):
            raise ConfigError(
                f"All {len(checked):,} prompts are longer than {max_tokens} tokens; the first is {checked[0].place}."
                f" {MAKE_ROOM}"
            )

    def held_out(self, count: int, max_tokens: int | None = None) -> list[Prompt]:
        """Returns prompts to evaluate on, with one sample each. Those over `max_tokens` are left out, which is
        logged."""
        items = self._source.held_out(count) if count else []
        prompts = [
            self._renderer.prompt(item, group=f"held-out-{number:08d}", num_samples=1)
            for number, item in enumerate(items)
        ]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        return list(compress(prompts, _told_fitting(items, lengths, max_tokens, "held-out prompts")))


def _told_fitting(items: Sequence[Item], lengths: Sequence[int], max_tokens: int | None, what: str) -> list[bool]:
    """Returns which items have at most `max_tokens`, and logs how many have more, and which is the longest."""
    fits = [max_tokens is None or length <= max_tokens for length in lengths]
    if not all(fits):
        longest = max(range(len(items)), key=lengths.__getitem__)
        log.warning(
            "%d of %d %s are longer than %d tokens and are passed over. The longest has %d: %s. %s",
            fits.count(False),
            len(items),
            what,
            max_tokens,
            lengths[longest],
            items[longest].place or items[longest].data_source,
            MAKE_ROOM,
        )
    return fits
