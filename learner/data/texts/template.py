"""The model's chat template makes a text of messages: a program in Jinja, in the model's files or the user's own."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from broker.errors import ConfigError
from learner.models.chat_template import RenderWatch

from .base import NOTHING, Message, Templated
from .messages import is_begun
from .tokens import Ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""
_PROBE = "xprobex"
_OTHERWISE = "Give one that does (model.chat_template=FILE), or leave out the column, or give it another name."
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Renders messages as the model's tokenizer does. All errors name what is rendered."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", watch: RenderWatch | None = None) -> None:
        self._tokenizer, self._ends = tokenizer, Ends(tokenizer)
        self._watch = watch or RenderWatch()
        self._takes_parts: bool | None = None

    @property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template."""
        return bool(self._tokenizer.chat_template)

    def text(
        self, messages: Sequence[Message], what: str, *, opens_answer: bool = False, given: Templated = NOTHING
    ) -> str:
        """Returns the text of messages; with `opens_answer` followed by the beginning of an answer, or without the end
        of the last message if that is an assistant's.

        Where an answer states the token that ends it, or the first message the one that begins a text, and the template
        writes that token, too, it stands there once. Raises ConfigError if there is no template, if it does not read
        all that is `given`, if it refuses the messages, or if it does not end.
        """
        self._check(what, given)
        goes_on = opens_answer and is_begun(list(messages))
        if goes_on and self._ends.split(messages[-1]["content"])[1] is not None:
            raise ConfigError(
                f"{what}: its last message is an assistant's, and ends with the stop token, after which a model says"
                " nothing. Leave the token out, so that the model goes on with the message, or add what it answers."
            )

        def render(bare: list[Message]) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    bare,
                    tools=given.tools or None,
                    add_generation_prompt=opens_answer and not goes_on,
                    continue_final_message=goes_on,
                    tokenize=False,
                    **given.chat_template_kwargs,
                )
            )

        return self._rendered(render, self._bare(messages, render, what), what)

    def marked(
        self, messages: Sequence[Message], what: str, *, given: Templated = NOTHING
    ) -> tuple[str, list[Span]] | None:
        """Returns the text, and the parts that the template marks by {% generation %}; None for one without marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=given.tools or None)
        if not _MARKED.search(template):
            return None

        def render(bare: list[Message]) -> tuple[str, list[Span]]:
            (text,), (spans,) = render_jinja_template(
                [bare],
                tools=given.tools or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map | given.chat_template_kwargs,
            )
            return text, spans

        return self._rendered(render, self._bare(messages, lambda bare: render(bare)[0], what), what)

    def _bare(self, messages: Sequence[Message], render: Callable[[list[Message]], str], what: str) -> list[Message]:
        """Returns the messages without those tokens at their borders that the template writes, too: stop tokens at the
        end of an answer, and the token that begins a text."""
        bos = self._tokenizer.bos_token or ""
        ended = [self._ends.split(each["content"])[0] for each in messages if _is_answer(each)]
        count = sum(text != each["content"] for text, each in zip(ended, filter(_is_answer, messages), strict=True))
        begins = bool(bos) and messages[0]["content"].startswith(bos)
        if not count and not begins:
            return list(messages)
        texts = iter(ended)
        bare = [each | {"content": next(texts)} if _is_answer(each) else each for each in messages]
        bare[0] = bare[0] | {"content": bare[0]["content"].removeprefix(bos)} if begins else bare[0]
        text = self._rendered(render, bare, what)
        return bare if self._ends.count(text) >= count and text.startswith(bos if begins else "") else list(messages)

    def _check(self, what: str, given: Templated) -> None:
        if not self.is_there:
            raise ConfigError(
                f"{what} is a list of messages, but the model's tokenizer has no chat template; "
                "give prompts as text, a template (model.chat_template=FILE), or use a chat model."
            )
        if not given.columns:
            return
        template = self._tokenizer.get_chat_template(tools=given.tools or None)
        if given.tools and "tools" not in template:
            raise ConfigError(
                f"{what} has 'tools', and the model's chat template does not write them, so the model would know of"
                f" none. {_OTHERWISE}"
            )
        own = self._arguments
        for name in given.chat_template_kwargs:
            if name in own:
                raise ConfigError(
                    f"{what} has {name!r} in 'chat_template_kwargs', which Headway decides itself. Leave it out: these"
                    " are values of names that the model's chat template reads."
                )
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConfigError(
                    f"{what} has {name!r} in 'chat_template_kwargs', and the model's chat template does not read it, so"
                    f" it would change nothing. {_OTHERWISE}"
                )

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """The names that say how a template is applied, and that of the messages."""
        return frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"} | {
            "messages"
        }

    def _rendered(self, render: Callable[[list[Message]], T], messages: list[Message], what: str) -> T:
        """Returns what `render` makes of the messages, in time."""
        path = self._tokenizer.name_or_path
        origin = f" (that of model.chat_template, or else of {path})" if path else ""
        whose = f"{what}: the model's chat template{origin}"
        given = [each | {"content": _parts(each["content"])} for each in messages] if self._takes(whose) else messages
        try:
            return self._watch.run(lambda: render(given), whose)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            raise ConfigError(
                f"{what} is a list of messages that the model's chat template refuses{origin}:"
                f" {type(error).__name__}: {' '.join(str(error).split())[:300]}. The messages are"
                f" {str(messages)[:200]}. Usual ones have a role (system, user, assistant in turns) and a content that"
                " is text."
            ) from error

    def _takes(self, whose: str) -> bool:
        """Returns whether the template writes lists of parts alone, as that of a model for pictures may, and not
        text."""
        if self._takes_parts is None:
            self._takes_parts = not self._writes(_PROBE, whose) and self._writes(_parts(_PROBE), whose)
        return self._takes_parts

    def _writes(self, content: Any, whose: str) -> bool:
        asked = [{"role": "user", "content": content}]
        try:
            return _PROBE in self._watch.run(
                lambda: str(self._tokenizer.apply_chat_template(asked, tokenize=False)), whose
            )
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - a template may refuse this conversation in any way, and take others
            return False


def refuse_for_text(given: Templated, what: str) -> None:
    """Raises ConfigError where something is given to the template of a text, which none renders."""
    for column in given.columns:
        raise ConfigError(
            f"{what} is text, into which no chat template writes the {column!r} of its row. Give it as messages, or"
            " leave out the column, or give it another name."
        )


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")
