"""What formats find in an answer's text, and how JSON is read of it: as it is written, never repaired."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from headway.rollout_workers.agents.conversation import Message, Tool, ToolCall

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)+)"')


class Reading(NamedTuple):
    """The parts of an answer without its reasoning."""

    content: str
    calls: Sequence[tuple[str, str]] = ()
    """The name and the arguments of each."""
    is_open: bool = False
    """Whether the text ends in the middle of a call."""


class Markup(Protocol):
    """The way in which a family of models writes calls of tools."""

    name: str
    template: str
    """A chat template in Jinja for tokenizers that have none."""
    closing: tuple[str, ...]
    """Tokens that end a turn in the place of the one that the template writes."""

    def read(self, text: str, is_ended: bool) -> Reading:
        """Return the parts of an answer to a conversation with tools. `is_ended`: the model ended it."""
        ...

    def as_text(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return checked messages in which tools, calls and their answers are texts, for templates without tools."""
        ...


class _Called(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def read_call(body: str, key: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is valid JSON, as `{"name": ..., KEY: ...}`; else None.
    `key`: arguments or parameters. A call that states none has "" as arguments."""
    try:
        called = msgspec.json.decode(body.strip(), type=_Called)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return called.name, str(bytes(getattr(called, key)), "utf-8")


def read_broken_call(body: str, key: str) -> tuple[str, str] | None:
    """Return the name of a call that is broken JSON, and as its arguments what the model wrote for them, or all of it
    where these cannot be told; None if it has no name, or one that no message can carry."""
    named = _NAME.search(body)
    if named is None:
        return None
    try:
        name = str(json.loads(f'"{named[1]}"'))
    except ValueError:
        return None
    if not is_text(name):
        return None
    found = re.search(rf'"{key}"\s*:\s*', body)
    if found is None:
        return name, body.strip()
    arguments = body[found.end() :].strip()
    return name, arguments if is_json(arguments) else arguments.removesuffix("}").rstrip()


def is_text(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which UTF-8 cannot express: escapes in JSON may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json(text: str) -> bool:
    """Return whether a text is valid JSON."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def numbered(calls: Sequence[tuple[str, str]]) -> tuple[ToolCall, ...]:
    """Return calls with ids that are unique within their answer."""
    return tuple(
        ToolCall(id=f"call_{place}", name=name, arguments=arguments) for place, (name, arguments) in enumerate(calls)
    )


class Thought(NamedTuple):
    """An answer's reasoning, and what follows it."""

    reasoning: str
    rest: str
    is_open: bool
    """Whether the text ends in the middle of the reasoning."""


def split_thought(text: str, is_begun: bool) -> Thought:
    """Return the reasoning of an answer that begins with <think>; `is_begun`: the prompt has begun it."""
    begun = text.lstrip()
    if begun.startswith("<think>"):
        text = begun.removeprefix("<think>")
    elif not is_begun:
        return Thought("", text, False)
    reasoning, end, rest = text.partition("</think>")
    return Thought(reasoning.strip("\n"), rest.lstrip("\n"), not end)
