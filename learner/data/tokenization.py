"""The one way from messages to the tokens that a model gets, in all stages and commands.

    content of a row ─ messages.py ─► text, or messages of one dialect ─ ChatTemplate ─► text ─ TextTokens ─► token ids

The model's chat template is a program in Jinja, in the model's files or the user's own. Texts become tokens that are
right at their borders: where a sequence begins, where a response follows its prompt, and where it ends.

The invariant: the same content gives the same tokens, whether it is a prompt of reinforcement learning, of an
evaluation or of `headway generate`, or the beginning of a record.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headway.broker.errors import ConfigError
from headway.learner.models.chat_template import RenderWatch
from headway.learner.models.end_tokens import end_tokens

from .messages import NOTHING, Message, TemplateInputs, is_begun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ends:
    """The tokens with which a model ends what it says, in texts that state them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them. Raises ConfigError for a model without any."""
        return end_tokens(self._tokenizer).any

    def split(self, text: str) -> tuple[str, int | None]:
        """Returns a text without the end tokens that it states at its end, and the white space after them; and the
        first of these tokens."""
        if found := self._behind.search(text):
            return text[: found.start()], int(self._tokenizer.convert_tokens_to_ids(found[1]))
        return text, None

    def count(self, text: str) -> int:
        """Returns how often a text states end tokens."""
        return len(self._any.findall(text))

    @cached_property
    def _any(self) -> re.Pattern[str]:
        known = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        # A configuration of another vocabulary may name the token of a word, which texts end with, too.
        tokens = self._tokenizer.convert_ids_to_tokens([token for token in self.token_ids if token in known])
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    @cached_property
    def _behind(self) -> re.Pattern[str]:
        return re.compile(rf"({self._any.pattern})\s*(?:(?:{self._any.pattern})\s*)*\Z")


class Continuation(NamedTuple):
    """A text and what follows it, as tokens."""

    before: list[int]
    after: list[int]
    is_whole: bool
    """Whether these are the tokens of both texts as one. If not, one of those would lie across the border."""


class TextTokens:
    """Makes tokens of texts. Raises ConfigError, naming `what`, for text that the tokenizer cannot encode."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def plain(self, text: str, what: str) -> list[int]:
        """Returns a text's own tokens."""
        from headway.learner.models.pretrained import encode  # imports torch, which callers that only read do not need

        return encode(self._tokenizer, text, what, add_special_tokens=False)

    def beginning(self, text: str, what: str) -> list[int]:
        """Returns the tokens of a text with which a sequence begins. What the tokenizer puts in front of a text, such
        as BOS, is there once, if the text has it or not. What it puts behind one is left out: more text follows."""
        plain, front = self.plain(text, what), self._front
        return plain if not plain or plain[: len(front)] == front else [*front, *plain]

    def continued(self, before: list[int], text: str, after: str, what: str) -> Continuation:
        """Returns `before`, the tokens of `text`, and those of `after`, which follows it. They are the tokens of both
        texts as one, if that begins with `before`."""
        plain = self.plain(text + after, what)
        front = self._front if before[: len(self._front)] == self._front != plain[: len(self._front)] else []
        whole = [*front, *plain]
        if whole[: len(before)] == before:
            return Continuation(before, whole[len(before) :], True)
        return Continuation(before, self.inner(after, what), False)

    def inner(self, text: str, what: str) -> list[int]:
        """Returns the tokens of a text that stands within another one: without the space that some tokenizers put in
        front of a text."""
        if not self._puts_space:
            return self.plain(text, what)
        line, behind = self.plain("\n", what), self.plain(f"\n{text}", what)
        return behind[len(line) :] if behind[: len(line)] == line else self.plain(text, what)

    @cached_property
    def _front(self) -> list[int]:
        """The tokens that the tokenizer puts in front of a text."""
        if not self._tokenizer.num_special_tokens_to_add():
            return []
        plain, added = (list(self._tokenizer("a", add_special_tokens=add).input_ids) for add in (False, True))
        begins = (n for n in range(len(added)) if added[n : n + len(plain)] == plain)
        return added[: next(begins, 0)]

    @cached_property
    def _puts_space(self) -> bool:
        """Whether the tokenizer puts a space in front of a text, as that of Llama 2 does."""
        try:
            alone, line, behind = (self.plain(text, "a text") for text in ("a", "\n", "\na"))
        except ConfigError:  # a tokenizer of characters that has not all of these puts none
            return False
        return behind[: len(line)] == line and behind[len(line) :] != alone


T = TypeVar("T")
Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""
_PROBE = "xprobex"
_ASKED = [{"role": "user", "content": _PROBE}]
_OTHERWISE = "Give one that does (model.chat_template=FILE), or leave out the column, or give it another name."
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message under which files have a thought. Which of them a template reads is its own."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

log = logging.getLogger(__name__)


class CallForm(NamedTuple):
    """The form in which a template takes the calls of functions: the usual one, or that of OpenAI's interface."""

    content: str | None = ""
    """The content of a message with calls and without words."""
    encodes: bool = False
    """Whether arguments are a text of JSON."""

    def of(self, message: Message) -> Message:
        """Returns a message in this form."""
        if "tool_calls" not in message:
            return message
        calls = [call | {"function": self._function(call["function"])} for call in message["tool_calls"]]
        return message | {"content": message["content"] or self.content, "tool_calls": calls}

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments", {})
        return function | {"arguments": json.dumps(arguments, ensure_ascii=False) if self.encodes else arguments}


class ChatTemplate:
    """Renders messages as the model's tokenizer does. All errors name what is rendered."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", watch: RenderWatch | None = None) -> None:
        self._tokenizer, self._ends = tokenizer, Ends(tokenizer)
        self._watch = watch or RenderWatch()
        self._takes_parts: bool | None = None
        self._form: CallForm | None = None
        self._written: set[tuple[Any, ...]] = set()
        self._is_opening_checked = False

    @property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template."""
        return bool(self._tokenizer.chat_template)

    @property
    def _origin(self) -> str:
        path = self._tokenizer.name_or_path
        return f" (that of model.chat_template, or else of {path})" if path else ""

    def text(
        self, messages: Sequence[Message], what: str, *, opens_answer: bool = False, given: TemplateInputs = NOTHING
    ) -> str:
        """Returns the text of messages; with `opens_answer` followed by the beginning of an answer, or without the end
        of the last message if that is an assistant's.

        Where an answer states the token that ends it, or the first message the one that begins a text, and the template
        writes that token, too, it stands there once. Raises ConfigError if there is no template, if it does not read
        all that is `given`, if it refuses the messages, or if it does not end.
        """
        self._check(what, given)
        self._check_thoughts(messages, what, given)
        if opens_answer:
            self._check_opening(f"{what}: the model's chat template{self._origin}")
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

        text = self._rendered(render, self._bare(messages, render, what), what)
        self._check_written(messages, given.tools, render, what)
        return text

    def marked(
        self, messages: Sequence[Message], what: str, *, given: TemplateInputs = NOTHING
    ) -> tuple[str, list[Span]] | None:
        """Returns the text, and the parts that the template marks by {% generation %}; None for one without marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._template(given)
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

    def _template(self, given: TemplateInputs) -> str:
        """Returns the template that renders these: a tokenizer may have one of its own for tools."""
        return str(self._tokenizer.get_chat_template(tools=given.tools or None))

    def _check(self, what: str, given: TemplateInputs) -> None:
        if not self.is_there:
            raise ConfigError(
                f"{what} is a list of messages, but the model's tokenizer has no chat template; "
                "give prompts as text, a template (model.chat_template=FILE), or use a chat model."
            )
        if not given.columns:
            return
        template = self._template(given)
        if given.tools and "tools" not in template:
            raise _not_written_tools(what)
        own = self._arguments
        for name in given.chat_template_kwargs:
            if name in own:
                raise ConfigError(
                    f"{what} has {name!r} in 'chat_template_kwargs', which Headway decides itself. Leave it out: these"
                    " are values of names that the model's chat template reads."
                )
            if not _reads(template, name):
                raise ConfigError(
                    f"{what} has {name!r} in 'chat_template_kwargs', and the model's chat template does not read it, so"
                    f" it would change nothing. {_OTHERWISE}"
                )

    def _check_thoughts(self, messages: Sequence[Message], what: str, given: TemplateInputs) -> None:
        stated = [name for name in _THOUGHTS if any(each.get(name) for each in messages)]
        if stated and not any(_reads(self._template(given), name) for name in stated):
            raise ConfigError(
                f"{what} has {stated[0]!r} in a message, and the model's chat template does not read it, so the thought"
                " would be left out. Give one that does (model.chat_template=FILE), or write the thought into the"
                " content, or leave it out."
            )

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """The names that say how a template is applied, and that of the messages."""
        return frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"} | {
            "messages"
        }

    def _check_opening(self, whose: str) -> None:
        """Warns once where the template opens no answer, but writes more than white space before one."""
        if self._is_opening_checked:
            return
        self._is_opening_checked = True
        asked, opened = (self._tried(_ASKED, whose, add_generation_prompt=opens) for opens in (False, True))
        begins, found, _ = self._tried([*_ASKED, {"role": "assistant", "content": "xanswerx"}], whose).partition(
            "xanswerx"
        )
        header = begins.removeprefix(asked) if found and asked == opened and begins.startswith(asked) else ""
        if header.strip():
            log.warning(
                "The model's chat template does not read add_generation_prompt: a prompt ends without %r, which stands"
                " before each answer. So the model must write that itself, and rewards read it. Add it to the template"
                " for prompts (model.chat_template=FILE).",
                header,
            )

    def _check_written(
        self, messages: Sequence[Message], tools: Sequence[Any], render: Callable[[list[Message]], str], what: str
    ) -> None:
        """Raises ConfigError where the template leaves out a message, a call or a tool. This is tried with words in
        the place of messages, once for each order of roles."""
        shape = (
            *((each["role"], bool(each["content"]), len(each.get("tool_calls", ()))) for each in messages),
            len(tools),
        )
        if shape in self._written:
            return
        probes = [_probe(number, each) for number, each in enumerate(messages)]
        try:
            text = self._rendered(render, [probe for probe, _ in probes], what)
        except ConfigError:  # a template may want more of a message than a word
            return
        if any(tool["function"]["name"] not in text for tool in tools):
            raise _not_written_tools(what)
        for message, (_, marks) in zip(messages, probes, strict=True):
            if left_out := [part for part, mark in marks.items() if mark not in text]:
                raise ConfigError(
                    f"{what}: the model's chat template does not write {left_out[0]} of a message of the"
                    f" {message['role']}, so the model would not know of it. Give a template that does"
                    " (model.chat_template=FILE), or leave it out."
                )
        self._written.add(shape)

    def _rendered(self, render: Callable[[list[Message]], T], messages: list[Message], what: str) -> T:
        """Returns what `render` makes of the messages, in time."""
        origin, whose = self._origin, f"{what}: the model's chat template{self._origin}"
        given = messages
        if any("tool_calls" in each for each in messages):
            form = self._form_of_calls(whose)
            given = [form.of(each) for each in messages]
        if self._takes(whose):
            given = [each | {"content": each["content"] and _parts(each["content"])} for each in given]
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
            as_parts = [{"role": "user", "content": _parts(_PROBE)}]
            self._takes_parts = _PROBE not in self._tried(_ASKED, whose) and _PROBE in self._tried(as_parts, whose)
        return self._takes_parts

    def _form_of_calls(self, whose: str) -> CallForm:
        """Returns the first form in which the template writes a call with its arguments, and not as Python or as text
        within text; the usual one where it writes none."""
        if self._form is None:
            forms = [CallForm(content, encodes) for encodes, content in product((False, True), ("", None))]
            self._form = next((each for each in forms if _is_call(self._tried(_called(each), whose))), forms[0])
        return self._form

    def _tried(self, messages: list[Message], whose: str, **options: Any) -> str:
        """Returns the text of a conversation that the template may refuse; empty then."""
        try:
            return str(
                self._watch.run(lambda: self._tokenizer.apply_chat_template(messages, tokenize=False, **options), whose)
            )
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - a template may refuse this conversation in any way, and take others
            return ""


def refuse_for_text(given: TemplateInputs, what: str) -> None:
    """Raises ConfigError where something is given to the template of a text, which none renders."""
    for column in given.columns:
        raise ConfigError(
            f"{what} is text, into which no chat template writes the {column!r} of its row. Give it as messages, or"
            " leave out the column, or give it another name."
        )


def _probe(number: int, message: Message) -> tuple[Message, dict[str, str]]:
    """Returns a message with words in the place of its content and of the functions that it calls, and these words."""
    content, marks = message["content"], {"the content": f"{_PROBE}{number}x"} if message["content"] else {}
    probe = message | {"content": marks.get("the content", content)}
    if calls := message.get("tool_calls"):
        marks |= {f"the call of {call['function']['name']!r}": f"{_PROBE}{number}c{n}x" for n, call in enumerate(calls)}
        probe["tool_calls"] = [
            call | {"function": call["function"] | {"name": f"{_PROBE}{number}c{n}x"}} for n, call in enumerate(calls)
        ]
    return probe, marks


def _called(form: CallForm) -> list[Message]:
    function = {"name": _PROBE, "arguments": {"xkeyx": "xvaluex"}}
    calls = [{"type": "function", "id": "call12345", "function": function}]
    return [*_ASKED, form.of({"role": "assistant", "content": "", "tool_calls": calls})]


def _is_call(text: str) -> bool:
    """Returns whether a text has the call of `_called`, as a model says it."""
    is_whole = text.count(_PROBE) > 1 and "xkeyx" in text and "xvaluex" in text
    return is_whole and not any(other in text for other in ("'xkeyx'", '\\"xkeyx', "None"))


def _not_written_tools(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has 'tools', and the model's chat template does not write them, so the model would know of none."
        f" {_OTHERWISE}"
    )


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")
