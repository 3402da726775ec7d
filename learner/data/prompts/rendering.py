"""Renders items to prompts that the broker carries, by chat templates and tokenization."""

from typing import TYPE_CHECKING

from broker.errors import ConfigError
from broker.schema import Prompt

from .base import Item, Message, PromptSource
from .files import ListedPrompts
from .sendable import check_sendable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 10_000
"""Of 20 tokens they take half a second, of 1,000 eight."""


class Renderer:
    """Messages go through the tokenizer's chat template, text as it is."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str = "") -> None:
        """With `system_prompt`, text too becomes a conversation: system, then user."""
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        if system_prompt and not tokenizer.chat_template:
            raise ConfigError(
                "prompts.system_prompt is set, but the model's tokenizer has no chat template; "
                "put the instruction into the prompts, or use a chat model."
            )

    def prompt(self, item: Item, *, group: str, num_samples: int) -> Prompt:
        """Tokenized, under the name `group`. Raises ConfigError where nothing is left to continue."""
        what = f"{item.place}: the prompt" if item.place else f"prompt {group} of {item.data_source!r}"
        check_sendable(item, what)
        text, token_ids = self.render(item.content, what)
        if not token_ids:
            raise ConfigError(f"{what} has no tokens: {text[:80]!r}.")
        return Prompt(
            group=group,
            token_ids=token_ids,
            text=text,
            ground_truth=item.ground_truth,
            data_source=item.data_source,
            extra_info=item.extra_info,
            num_samples=num_samples,
        )

    def render(self, content: str | list[Message], what: str) -> tuple[str, list[int]]:
        """The text that the model is given, and its tokens; errors name `what`."""
        from learner.models.model import encode  # torch, which who only asks for a source's items does without

        if isinstance(content, str) and not self._system_prompt:
            return content, encode(self._tokenizer, content, what)
        text = self._conversation(self._messages(content), what)
        # The template has written the special tokens already.
        return text, encode(self._tokenizer, text, what, add_special_tokens=False)

    def _messages(self, content: str | list[Message]) -> list[Message]:
        if isinstance(content, list):
            return content
        return [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": content}]

    def _conversation(self, messages: list[Message], what: str) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{what} is a list of messages, but the model's tokenizer has no chat template; "
                "give prompts as text, or use a chat model."
            )
        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"{what} is a list of messages that the model's chat template refuses ({error}): {str(messages)[:200]}."
                " Usual ones have a role (system, user, assistant in turns) and a content that is text."
            ) from error


class Prompts:
    """A source and its renderer: prompts as tokens, at random access."""

    def __init__(self, source: PromptSource, renderer: Renderer) -> None:
        self._source = source
        self._renderer = renderer

    @property
    def size(self) -> int | None:
        """Prompts of one epoch; None: endless."""
        return self._source.size

    def train(self, epoch: int, position: int, *, group: str, num_samples: int) -> Prompt:
        """The training item at that place, to be sampled `num_samples` times under the name `group`."""
        item = self._source.train(epoch, position)
        return self._renderer.prompt(item, group=group, num_samples=num_samples)

    def check(self, rows: int = CHECKED_ROWS) -> None:
        """Render the first of what is listed. Raises ConfigError for a row that would end the run in its midst."""
        if isinstance(self._source, ListedPrompts):
            for position in range(min(self._source.size, rows)):
                self.train(0, position, group="check", num_samples=1)

    def held_out(self, count: int) -> list[Prompt]:
        """Prompts to evaluate on, one sample each."""
        items = self._source.held_out(count) if count else []
        return [self._renderer.prompt(item, group=f"held-out-{i:08d}", num_samples=1) for i, item in enumerate(items)]
