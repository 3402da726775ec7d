"""A compact format without roles, for models without a chat template, such as our own of a few characters.

    ^4*5+2=[4*5]20+2=22#2$      with call_begin "[" and call_end "]": the model calls the tool with 4*5, reads 20 behind
                                it, and goes on; it ends the answer with its end token

The options say what stands around a call and around what the model reads.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.conversation import FormatError, Message, ParsedAnswer, Tool

from .messages import check_asks, checked
from .options import AgentFormatOptions
from .reading import numbered
from .vocabulary import Vocabulary

_CUT = "\ue000"
"""Cuts the names of special tokens in a message. A text that has this character itself is refused."""


class PlainFormat:
    """One tool with one argument, which is the text between two marks."""

    name = "plain"

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], options: AgentFormatOptions) -> None:
        """Raises ConfigError for options that do not fit each other, or that the tokenizer cannot encode."""
        self._options, self._vocabulary = options, Vocabulary(tokenizer)
        self._front, self._end = self._vocabulary.front(), end_tokens[0]
        self._call_begin, self._call_end = self._mark("call_begin"), self._mark("call_end")
        self._result_begin, self._result_end = self._mark("result_begin"), self._mark("result_end")
        self._input_begin, self._input_end = self._mark("input_begin"), self._mark("input_end")
        if bool(self._call_begin) != bool(self._call_end):
            raise ConfigError("agent.format.options: give both of call_begin and call_end, or neither.")
        if options.tool and not self._call_begin:
            raise ConfigError("agent.format.options: `tool` is given, but neither call_begin nor call_end.")
        if len(self._call_end) > 1:
            raise ConfigError(
                f"agent.format.options: call_end is {options.call_end!r}, which is {len(self._call_end)} tokens."
                " It ends the model's turn, so it must be one."
            )
        if self._call_end and (options.call_begin == options.call_end or self._call_end[0] in end_tokens):
            raise ConfigError("agent.format.options: call_end must differ from call_begin and from the end token.")
        self.stop_token_ids = (*end_tokens, *self._call_end)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation. Raises FormatError."""
        found = checked(messages, tools)
        check_asks(found)
        self._argument_of(tools)
        return [*self._front, *self._written(found)]

    def bridge(
        self, previous: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return what follows an answer. One that was cut behind the beginning of a call is followed by nothing."""
        try:
            found = checked(new_messages, tools)
            check_asks(found)
            written = self._written(found)
        except FormatError:
            return None  # the session renders the whole conversation, which says what is wrong with it
        if previous and previous[-1] in self.stop_token_ids:
            return written
        return None if tools and self._is_in_call(previous) else [self._end, *written]

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """Return the parts of an answer: a call where it ends with one."""
        is_ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text = self._vocabulary.decode(token_ids[:-1] if is_ended else token_ids)
        if not is_ended or token_ids[-1] not in self._call_end:
            return ParsedAnswer(content=text)
        content, begin, argument = text.rpartition(self._options.call_begin)
        try:
            name, key = self._argument_of(tools)
        except FormatError:
            name = ""
        if not begin or not name:
            return ParsedAnswer(content=text + self._options.call_end)
        arguments = json.dumps({key: argument}, ensure_ascii=False)
        return ParsedAnswer(content=content, tool_calls=numbered([(name, arguments)]))

    def _written(self, messages: list[Message]) -> list[int]:
        for one, other in pairwise(messages):
            roles = one["role"], other["role"]
            if roles == ("assistant", "assistant"):
                raise FormatError("Two messages of the assistant follow each other.")
            if "assistant" not in roles and not self._is_marked_between(*roles):
                raise FormatError(
                    f"Messages of the roles {' and '.join(roles)} would run into each other. Put them into one, or mark"
                    " them by the options input_begin, input_end, result_begin and result_end."
                )
        return [token for message in messages for token in self._message(message)]

    def _is_marked_between(self, role: str, next_role: str) -> bool:
        end = self._result_end if role == "tool" else self._input_end
        return bool(end or (self._result_begin if next_role == "tool" else self._input_begin))

    def _message(self, message: Message) -> list[int]:
        content = self._encoded(message["content"])
        match message["role"]:
            case "assistant":
                return [*content, *(self._call(message["tool_calls"]) if "tool_calls" in message else [self._end])]
            case "tool":
                return [*self._result_begin, *content, *self._result_end]
        return [*self._input_begin, *content, *self._input_end]

    def _call(self, calls: list[dict[str, Any]]) -> list[int]:
        if len(calls) > 1 or not self._call_begin:
            raise FormatError(f"The format plain writes one tool call an answer, and none without call_begin: {calls}.")
        arguments = calls[0]["function"]["arguments"]
        try:
            (argument,) = json.loads(arguments).values()
        except (ValueError, AttributeError, RecursionError):
            raise FormatError(f"The format plain writes calls with one argument, not {arguments[:200]!r}.") from None
        text = argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)
        if self._options.call_end in text:
            raise FormatError(f"The argument {text[:200]!r} has the end of a call, {self._options.call_end!r}.")
        return [*self._call_begin, *self._encoded(text), *self._call_end]

    def _argument_of(self, tools: Sequence[Tool]) -> tuple[str, str]:
        """Return the names of the tool that answers call, and of its only argument. Raises FormatError."""
        if not tools:
            return "", ""
        if not self._call_begin:
            raise FormatError("The format plain has no tools without the options call_begin and call_end.")
        functions = [tool["function"] for tool in tools]
        named = [one for one in functions if self._options.tool in ("", one["name"])]
        if len(named) != 1:
            raise FormatError(
                f"The format plain has one tool, and these are {[one['name'] for one in functions]}."
                " The option `tool` names it."
            )
        properties = list((named[0].get("parameters") or {}).get("properties") or {})
        if len(properties) != 1:
            raise FormatError(f"The tool {named[0]['name']} of the format plain must have one argument: {properties}.")
        return named[0]["name"], properties[0]

    def _is_in_call(self, previous: Sequence[int]) -> bool:
        """Return whether a call has begun since the last token that ends a turn."""
        last = next((place for place in range(len(previous) - 1, -1, -1) if previous[place] in self.stop_token_ids), -1)
        begins = self._vocabulary.decode(previous[last + 1 :])
        return bool(self._options.call_begin) and self._options.call_begin in begins

    def _encoded(self, text: str) -> list[int]:
        if _CUT in text:
            raise FormatError(f"A message has the character {_CUT!r}, which means nothing. Leave it out.")
        guarded = self._vocabulary.guarded(text, _CUT)
        if not self._options.unknown_character:
            return self._vocabulary.encode(guarded, _CUT)
        try:
            return self._vocabulary.encode(guarded, _CUT)
        except FormatError:
            return [token for one in text for token in self._character(one)]

    def _character(self, character: str) -> list[int]:
        try:
            return self._vocabulary.encode(character)
        except FormatError:
            return self._vocabulary.encode(self._options.unknown_character)

    def _mark(self, name: str) -> list[int]:
        try:
            return self._vocabulary.encode(getattr(self._options, name))
        except FormatError as error:
            raise ConfigError(f"agent.format.options: {name}: {error} Choose characters that the model has.") from error
