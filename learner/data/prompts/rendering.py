"""Renders items to prompts that the broker carries, by chat templates and tokenization."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker.errors import ConfigError
from broker.schema import Prompt
from learner.models.end_tokens import end_tokens

from .base import Item, Message, PromptSource
from .files import ListedPrompts
from .sendable import check_sendable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 10_000
"""The number of rows rendered by a check: half a second with 20 tokens in each, eight seconds with 1,000."""


class Renderer:
    """Renders messages by the tokenizer's chat template, and text as it is."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str = "") -> None:
        """With a `system_prompt`, text becomes a conversation, too: system, then user."""
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        if system_prompt and not tokenizer.chat_template:
            raise ConfigError(
                "prompts.system_prompt is set, but the model's tokenizer has no chat template; "
                "put the instruction into the prompts, give a template (model.chat_template=FILE), or use a chat model."
            )

    def prompt(self, item: Item, *, group: str, num_samples: int) -> Prompt:
        """Returns the tokenized prompt, named `group`. Raises ConfigError where nothing is left to continue."""
        what = f"{item.place}: the prompt" if item.place else f"prompt {group} of {item.data_source!r}"
        check_sendable(item, what)
        text, token_ids = self.render(item.content, what)
        if not token_ids:
            raise ConfigError(f"{what} has no tokens: {text[:80]!r}.")
        return Prompt(
            group=group,
            token_ids=token_ids,
            text=text,
            messages=item.content if isinstance(item.content, list) else None,
            ground_truth=item.ground_truth,
            data_source=item.data_source,
            extra_info=item.extra_info,
            num_samples=num_samples,
        )

    def render(self, content: str | list[Message], what: str) -> tuple[str, list[int]]:
        """Returns the text that the model gets, and its tokens. Errors name `what`."""
        from learner.models.model import encode  # imports torch, which callers that only want items do not need

        if isinstance(content, str) and not self._system_prompt:
            return content, encode(self._tokenizer, content, what)
        text = self.conversation(self._messages(content), what)
        # The template has written the special tokens already.
        return text, encode(self._tokenizer, text, what, add_special_tokens=False)

    @property
    def end_of_text(self) -> int:
        """The token that ends an answer to a prompt that is text, and thus of a turn if it is made a conversation."""
        ends = end_tokens(self._tokenizer)
        return ends.turn if self._system_prompt else ends.text

    def _messages(self, content: str | list[Message]) -> list[Message]:
        if isinstance(content, list):
            return content
        return [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": content}]

    def conversation(
        self, messages: list[Message], what: str, *, is_answered: bool = False, tools: Sequence[Any] = ()
    ) -> str:
        """Returns the text of messages by the chat template, and the beginning of an answer to them if they have none.

        Raises ConfigError, naming `what`, if there is no template or if it refuses the messages.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{what} is a list of messages, but the model's tokenizer has no chat template; "
                "give prompts as text, a template (model.chat_template=FILE), or use a chat model."
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=list(tools) or None, add_generation_prompt=not is_answered, tokenize=False
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"{what} is a list of messages that the model's chat template refuses ({error}): {str(messages)[:200]}."
                " Usual ones have a role (system, user, assistant in turns) and a content that is text."
            ) from error


class Prompts:
    """A source with a renderer: prompts as tokens, at random access."""

    def __init__(self, source: PromptSource, renderer: Renderer) -> None:
        self._source = source
        self._renderer = renderer

    @property
    def size(self) -> int | None:
        """The number of prompts in an epoch; None for an endless source."""
        return self._source.size

    def train(self, epoch: int, position: int, *, group: str, num_samples: int) -> Prompt:
        """Returns the training prompt at that place, to be sampled `num_samples` times under the name `group`."""
        item = self._source.train(epoch, position)
        return self._renderer.prompt(item, group=group, num_samples=num_samples)

    def check(self, rows: int = CHECKED_ROWS) -> None:
        """Renders the first rows of a finite source. Raises ConfigError for a row that would later end the run."""
        if isinstance(self._source, ListedPrompts):
            for position in range(min(self._source.size, rows)):
                self.train(0, position, group="check", num_samples=1)

    def held_out(self, count: int) -> list[Prompt]:
        """Returns prompts to evaluate on, with one sample each."""
        items = self._source.held_out(count) if count else []
        return [self._renderer.prompt(item, group=f"held-out-{i:08d}", num_samples=1) for i, item in enumerate(items)]
