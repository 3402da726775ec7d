"""Conversations as agents write them, and as models read them.

Messages and tools have the shape of OpenAI's chat completions, whatever dialect an agent speaks.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from headway.broker.errors import HeadwayError

LONG_TEXT = 8192
"""Characters of which a tokenizer takes milliseconds to make tokens. A thread costs more than a shorter text."""

T = TypeVar("T")


class FormatError(HeadwayError):
    """A conversation has what the model's format cannot express, such as a picture or a role that it does not know."""


Message = dict[str, Any]
"""`role` (system, user, assistant, tool), `content` (text, or None beside tool calls), of an assistant perhaps
`tool_calls` ({id, type: function, function: {name, arguments: JSON text}}) and `reasoning_content`, of a tool
`tool_call_id` and perhaps `name`."""

Tool = dict[str, Any]
"""{type: function, function: {name, description, parameters: JSON schema}}"""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that an answer calls."""

    id: str
    """Unique within its episode."""
    name: str
    arguments: str
    """JSON text as the model wrote it, broken or not: it is never repaired."""


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of what the model wrote."""

    content: str
    """The text besides reasoning and tool calls; "" if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What a reasoning model wrote before its answer."""

    def message(self) -> Message:
        """Return the assistant's message that a later call repeats."""
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in self.tool_calls
        ]
        return assistant_message(self.content, self.reasoning, calls)


def assistant_message(content: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> Message:
    """Return an assistant's message, of an answer or of a call that repeats it: sessions find the turn by it."""
    message: Message = {"role": "assistant", "content": content or (None if tool_calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def begin(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """Return the conversation, with a system prompt before its own."""
    begun = [dict(one) for one in messages]
    if not system_prompt:
        return begun
    if begun and begun[0]["role"] == "system":
        begun[0] = {**begun[0], "content": f"{system_prompt}\n\n{begun[0]['content']}"}
        return begun
    return [{"role": "system", "content": system_prompt}, *begun]


class ChatFormat(Protocol):
    """Writes conversations as one family of models reads them, and reads what the model wrote."""

    name: str
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation, up to where the model's next answer begins.

        Raises FormatError for a role, a content or a tool that the format cannot express.
        """
        ...

    def bridge(
        self, previous: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the tokens that follow `previous`, up to where the next answer begins; `previous` is a prompt with the
        answer that the model sampled, to the answer's last token.

        `new_messages` are those after that answer: of tools and of the user, or of the system. None if no exact
        continuation exists, such as after an answer that its length cut in the middle of a tool call.
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """Return the parts of an answer, which is any tokens: what the format cannot read is content."""
        ...


def content_of(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


async def beside(messages: Sequence[Message], work: Callable[..., T], *arguments: Any) -> T:
    """Return what a format makes of messages: in a thread where they are long, as other calls would wait for it."""
    if sum(len(content_of(message)) for message in messages) < LONG_TEXT:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
