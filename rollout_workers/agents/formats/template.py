"""Conversations by a chat template in Jinja, which also tells what follows an answer.

    messages ─► checked, names of special tokens cut ─► the template ─► text ─► tokens
    bridge: the same with an answer that is one mark; what the template writes behind the mark follows any answer

The template writes each text as the model was trained on it, and only what it writes itself can be a special token.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.conversation import FormatError, Message, ParsedAnswer, Tool

from .messages import check_asks, checked
from .reading import Markup, Reading, Thought, numbered, split_thought
from .vocabulary import Vocabulary

_ASKED: Message = {"role": "user", "content": "question"}
_PRIVATE = range(0xE000, 0xF900)
"""Characters without a meaning, of which some stand for parts of a text while the template writes it."""
_PROBE = "xprobex"
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"xkeyx": {"type": "string"}}, "required": ["xkeyx"]},
    },
}
_OTHERWISE = (
    "Give agent.format.kind=renderers, if that knows the model, or another template (model.chat_template=FILE)."
)
MOST_TOOLS = 16
"""The most sets of tools that a format keeps."""
_ARGUMENTS = '{"xkeyx": "xvaluex"}'


def _called(arguments: Any) -> Message:
    function = {"name": _PROBE, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


_CALL = _called(_ARGUMENTS)

log = logging.getLogger(__name__)


class Marks(NamedTuple):
    """Characters that a conversation does not have."""

    cut: str
    argument: str
    answer: str


class TemplateFormat:
    """A format of models whose turns end with a token, by their template and the markup of their tool calls."""

    def __init__(self, tokenizer: Any, markup: Markup, end_tokens: Sequence[int], options: dict[str, Any]) -> None:
        """Raises ConfigError for a template that does not fit."""
        self.name = markup.name
        self.vocabulary = Vocabulary(tokenizer)
        self._tokenizer, self._markup, self._options = tokenizer, markup, options
        self._template = None if tokenizer.chat_template else markup.template
        self._has_guarded = False
        self._newest_tools: dict[tuple[bytes, str], list[Tool]] = {}
        self.writes_tools = self._writes_tools()
        self.writes_reasoning = self._writes_reasoning()
        self.opening_text = self._opening_text()
        self._opening = self.vocabulary.encode(self.opening_text)
        self.end_text, self.end = self._turn_end()
        closing = [self.vocabulary.added[text] for text in markup.closing if text in self.vocabulary.added]
        self._closing = frozenset((self.end, *closing))
        self.stop_token_ids = tuple(dict.fromkeys((*end_tokens, self.end, *closing)))
        self.begins_thought = self.opening_text.rfind("<think>") > self.opening_text.rfind("</think>")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation. Raises FormatError."""
        found = checked(messages, tools)
        check_asks(found)
        marks = _marks(found, tools)
        return self.vocabulary.encode(self._text(found, tools, marks), marks.cut)

    def bridge(
        self, previous: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return what follows an answer as the template writes it, or None."""
        answer = self._answer(previous)
        if answer is None:
            return None
        is_closed = bool(answer) and answer[-1] in self._closing
        is_ended = bool(answer) and answer[-1] in self.stop_token_ids
        if not is_ended and self._is_open(answer, tools):
            return None
        try:
            tokens = self._following(new_messages, tools)
        except FormatError:
            return None  # the session renders the whole conversation, which says what is wrong with it
        return tokens[1:] if is_closed else tokens

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """Return the parts of an answer, whatever its tokens are."""
        thought, reading = self._read(token_ids, tools)
        return ParsedAnswer(content=reading.content, tool_calls=numbered(reading.calls), reasoning=thought.reasoning)

    def following_text(self, new_messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, str]:
        """Return the text that follows an answer, from the token that ends it, and the character that cuts it.

        Raises FormatError.
        """
        found = checked(new_messages, tools)
        check_asks(found)
        marks = _marks(found, tools)
        answer: Message = {"role": "assistant", "content": marks.answer}
        # Texts in the place of tools would stand in the system's message, far in front.
        written = tools if self.writes_tools else ()
        text = self._text([_ASKED, answer, *found], written, marks).rpartition(marks.answer)[2]
        if not text.startswith(self.end_text):
            raise FormatError(f"The model's chat template does not end an answer with {self.end_text!r} here.")
        return text, marks.cut

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opens: bool = True) -> str:
        """Return the text of a conversation, without cuts. Raises FormatError."""
        found = checked(messages, tools)
        marks = _marks(found, tools)
        return self._text(found, tools, marks, opens=opens).replace(marks.cut, "")

    def _following(self, new_messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        text, cut = self.following_text(new_messages, tools)
        tokens = self.vocabulary.encode(text, cut)
        if tokens[:1] != [self.end]:
            raise FormatError(f"The model's tokenizer does not make one token of {self.end_text!r}.")
        return tokens

    def _answer(self, previous: Sequence[int]) -> list[int] | None:
        """Return the tokens behind the last beginning of an answer; None if there is none."""
        length, opening = len(self._opening), self._opening
        for place in range(len(previous) - length, -1, -1):
            if previous[place] == opening[0] and list(previous[place : place + length]) == opening:
                return list(previous[place + length :])
        return None

    def _is_open(self, answer: list[int], tools: Sequence[Tool]) -> bool:
        thought, reading = self._read(answer, tools)
        return thought.is_open or reading.is_open

    def _read(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> tuple[Thought, Reading]:
        is_ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self.vocabulary.decode(token_ids[:-1] if is_ended else token_ids)
        thought = Thought("", text, False)
        if self.writes_reasoning or self.begins_thought:
            thought = split_thought(text, self.begins_thought)
        return thought, self._markup.read(thought.rest, is_ended) if tools else Reading(thought.rest)

    def _text(self, messages: list[Message], tools: Sequence[Tool], marks: Marks, *, opens: bool = True) -> str:
        """Return the text of checked messages, with cuts."""
        guarded = [self._guarded(message, marks.cut) for message in messages]
        written = self._guarded_tools(tools, marks.cut)
        if not self.writes_tools:
            guarded, written = self._markup.as_text(guarded, written), []
        given, arguments = _with_marked_arguments(guarded, marks.argument)
        text = self._rendered(given, written, opens=opens)
        if marks.cut in text and not self._has_guarded:
            self._has_guarded = True
            log.warning("A message has the name of a special token. The model reads it as text, here and later.")
        for place, argument in enumerate(arguments):
            mark = f"{marks.argument}{place}{marks.argument}"
            if text.count(mark) != 1:
                raise FormatError("The model's chat template does not write each tool call once.")
            text = text.replace(f'"{mark}"', argument).replace(mark, argument)
        _check_written(guarded, text)
        return text

    def _rendered(self, messages: list[Message], tools: list[Tool], *, opens: bool = True) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    chat_template=self._template,
                    add_generation_prompt=opens,
                    tokenize=False,
                    **self._options,
                )
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise FormatError(
                f"The model's chat template refuses a conversation: {type(error).__name__}:"
                f" {' '.join(str(error).split())[:300]}. Its roles are {[message['role'] for message in messages]}."
            ) from error

    def _guarded(self, message: Message, cut: str) -> Message:
        is_trusted = message["role"] in ("system", "assistant")
        texts = {
            key: self.vocabulary.guarded(message[key], cut, is_trusted=is_trusted)
            for key in ("content", "reasoning_content", "name")
            if key in message
        }
        if "tool_calls" not in message:
            return message | texts
        calls = [
            call | {"function": {key: self.vocabulary.guarded(text, cut, is_trusted=True) for key, text in named}}
            for call in message["tool_calls"]
            for named in [call["function"].items()]
        ]
        return message | texts | {"tool_calls": calls}

    def _guarded_tools(self, tools: Sequence[Tool], cut: str) -> list[Tool]:
        """Return tools with cuts. Those of the newest calls are kept: an agent's calls have the same, again and
        again."""
        if not tools:
            return []
        key = msgspec.json.encode(tools), cut
        found = self._newest_tools.get(key)
        if found is None:
            found = [self._guarded_tool(tool, cut) for tool in tools]
            newest = list(self._newest_tools.items())[1 - MOST_TOOLS :]
            self._newest_tools = dict([*newest, (key, found)])
        return found

    def _guarded_tool(self, part: Any, cut: str) -> Any:
        if isinstance(part, str):
            return self.vocabulary.guarded(part, cut, is_trusted=True)
        if isinstance(part, dict):
            return {self._guarded_tool(key, cut): self._guarded_tool(each, cut) for key, each in part.items()}
        return [self._guarded_tool(each, cut) for each in part] if isinstance(part, list | tuple) else part

    def _writes_tools(self) -> bool:
        """Return whether the template writes tools. Raises ConfigError if it does not write calls as the markup."""
        self.writes_tools = True  # while this is found out
        if _PROBE not in self.text([_ASKED], [_TOOL]):
            return False
        try:
            called, before = self.text([_ASKED, _CALL], [_TOOL], opens=False), self.text([_ASKED], [_TOOL], opens=False)
            usual = self._rendered([_ASKED, _called(json.loads(_ARGUMENTS))], [_TOOL], opens=False)
        except FormatError as error:
            raise ConfigError(
                f"The model's chat template writes the arguments of a tool call in another way than the format"
                f" {self.name} does. {_OTHERWISE} {error}"
            ) from error
        if called != usual or _ARGUMENTS not in called.removeprefix(before):
            raise ConfigError(
                f"The model's chat template writes a tool call as {usual.removeprefix(before)[:300]!r}, which the"
                f" format {self.name} does not read. {_OTHERWISE}"
            )
        return True

    def _writes_reasoning(self) -> bool:
        call = (_CALL if self.writes_tools else _ASKED | {"role": "assistant"}) | {"reasoning_content": _PROBE * 2}
        try:
            return _PROBE * 2 in self.text([_ASKED, call], [_TOOL] * self.writes_tools, opens=False)
        except FormatError:
            return False

    def _opening_text(self) -> str:
        whole, before = (self.text([_ASKED], opens=opens) for opens in (True, False))
        opening = whole.removeprefix(before)
        if not whole.startswith(before) or not opening:
            raise ConfigError(
                "The model's chat template does not say where an answer begins: it does not heed"
                " add_generation_prompt. Give one that does (model.chat_template=FILE)."
            )
        return opening

    def _turn_end(self) -> tuple[str, int]:
        answered = self.text([_ASKED, {"role": "assistant", "content": _PROBE}, _ASKED])
        behind = answered.rpartition(_PROBE)[2]
        found = max((text for text in self.vocabulary.added if behind.startswith(text)), key=len, default="")
        if not found:
            raise ConfigError(
                f"The model's chat template ends an answer with {behind[:40]!r}, which is no token of its own."
            )
        return found, self.vocabulary.added[found]


def _with_marked_arguments(messages: list[Message], mark: str) -> tuple[list[Message], list[str]]:
    """Return messages with marks in the place of the calls' arguments, and these, which a template would write anew."""
    arguments: list[str] = []
    marked = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"] | {"arguments": f"{mark}{len(arguments)}{mark}"}
            arguments.append(call["function"]["arguments"])
            calls.append(call | {"function": function})
        marked.append(message | {"tool_calls": calls} if calls else message)
    return marked, arguments


def _check_written(messages: list[Message], text: str) -> None:
    """Raise FormatError where a text lacks the content of a message."""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            content = content.rpartition("</think>")[2]  # templates leave out old thoughts
        content = content.strip()
        if content and content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise FormatError(
                f"The model's chat template does not write the content of a message of the role {message['role']}:"
                f" {content[:200]!r}."
            )


def _marks(messages: Sequence[Message], tools: Sequence[Tool]) -> Marks:
    try:
        given = msgspec.json.encode((messages, tools))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"A conversation and its tools are to be JSON: {error}.") from error
    free = (one for one in map(chr, _PRIVATE) if one.encode() not in given)
    found = [one for one, _ in zip(free, Marks._fields, strict=False)]
    if len(found) < len(Marks._fields):
        raise FormatError("A conversation has all private characters of Unicode.")
    return Marks(*found)
