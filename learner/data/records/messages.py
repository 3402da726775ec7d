"""Messages of any dialect (OpenAI's role and content, ShareGPT's from and value) become those of chat templates."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .base import Message, RowError, shown

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""The words of files -> roles of chat templates; `function_call` becomes an assistant's message with a call."""
OPENING = ("system", "developer")


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The names that messages of a file have for their parts and roles, as LLaMA-Factory's `tags`. Empty: the usual."""

    role_tag: str = ""
    content_tag: str = ""
    user_tag: str = ""
    assistant_tag: str = ""
    observation_tag: str = ""
    function_tag: str = ""
    system_tag: str = ""

    def roles(self) -> Mapping[str, str]:
        """Returns what each role of the file means."""
        own = {
            self.user_tag: "user",
            self.assistant_tag: "assistant",
            self.observation_tag: "tool",
            self.function_tag: "function_call",
            self.system_tag: "system",
        }
        return ROLES | {name: role for name, role in own.items() if name}


def to_messages(value: Any, place: str, column: str, tags: Tags) -> list[Message]:
    """Returns a column's messages. Raises RowError."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RowError(
            place,
            f"whose {column!r} is no list of messages",
            f"{column!r} is {shown(value)}",
            'Expected a list of messages, such as [{"role": "user", "content": "..."}].',
        )
    return [_message(each, f"{column}[{number}]", place, tags) for number, each in enumerate(value)]


def _message(value: Any, what: str, place: str, tags: Tags) -> Message:
    value = {name: part for name, part in value.items() if part is not None} if isinstance(value, Mapping) else value
    role_key, content_key = _keys(value, tags)
    if not isinstance(value, dict) or not isinstance(value.get(role_key), str):
        raise RowError(
            place,
            "with a message without a role",
            f"{what} is {shown(value)}",
            "Expected `role` and `content`, or `from` and `value`; name others in options.tags.",
        )
    role = tags.roles().get(value[role_key])
    if role is None:
        raise RowError(
            place,
            "with an unknown role",
            f"{what} has the role {shown(value[role_key])}",
            f"Known: {', '.join(ROLES)}; name others in options.tags, such as {{user_tag: ...}}.",
        )
    message: Message = {"role": role, "content": value.get(content_key, "")}
    message |= {
        name: value[name] for name in ("tool_calls", "name", "tool_call_id", "reasoning_content") if value.get(name)
    }
    _unfold_parts(message, what, place)
    if role == "function_call":
        message = {"role": "assistant", "content": "", "tool_calls": _calls(message["content"], what, place)}
    if not message["content"] and not message.get("tool_calls"):
        reason = "with an empty response" if message["role"] == "assistant" else "with an empty message"
        raise RowError(place, reason, f"{what}, of the {role}, is empty", "Write its text, or leave the record out.")
    return message if _is_trained(value, what, place) else message | {"trained": False}


def _keys(value: Any, tags: Tags) -> tuple[str, str]:
    names = ("from", "value") if isinstance(value, Mapping) and "from" in value else ("role", "content")
    return tags.role_tag or names[0], tags.content_tag or names[1]


def _unfold_parts(message: Message, what: str, place: str) -> None:
    """Makes a text of a content that is a list of parts."""
    content = message["content"]
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        raise RowError(
            place, "with a content that is no text", f"{what} has the content {shown(content)}", "Write it as text."
        )
    texts = [_part_text(part, what, place) for part in content]
    message["content"] = "".join(text for kind, text in texts if kind == "text")
    if thought := "".join(text for kind, text in texts if kind == "reasoning"):
        message["reasoning_content"] = thought
    if calls := [call for kind, text in texts if kind == "tool_call" for call in _calls(text, what, place)]:
        message["tool_calls"] = calls


def _part_text(part: Mapping[str, Any], what: str, place: str) -> tuple[str, str]:
    kind, text = part["type"], part.get("text") or part.get("value") or ""
    if kind not in ("text", "reasoning", "tool_call"):
        raise RowError(
            place,
            "with other than text",
            f"{what} has a part of type {shown(kind)}",
            "Headway trains on text alone; leave the record out.",
        )
    if not isinstance(text, str):
        raise RowError(place, "with a content that is no text", f"{what} has the part {shown(part)}", "Write text.")
    return kind, text


def _calls(text: str, what: str, place: str) -> list[dict[str, Any]]:
    """Returns the calls of functions that a text of JSON states: one, or a list of them."""
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        stated = None
    calls = stated if isinstance(stated, list) else [stated]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(
            place,
            "with a call of a function that is no JSON",
            f"{what} is {shown(text)}",
            'Expected {"name": "...", "arguments": {...}}.',
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_trained(value: Mapping[str, Any], what: str, place: str) -> bool:
    """Returns what `weight` (OpenAI) or `loss_weight` (LLaMA-Factory) of a message says: 0 is context alone."""
    weight = value.get("weight", value.get("loss_weight", 1))
    if weight not in (0, 1):
        raise RowError(
            place,
            "with a weight that is neither 0 nor 1",
            f"{what} has the weight {shown(weight)}",
            "A turn is trained (1) or not (0).",
        )
    return bool(weight)


def check_turns(messages: list[Message], place: str, *, ends_with: str) -> None:
    """Raises RowError where roles are out of order, or where the last one is not `ends_with`: an assistant's turn, or
    `prompt`, what an assistant answers."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles and roles[0] in OPENING else roles
    for before, role in zip(["system", *turns], turns, strict=False):
        if role in OPENING or role == before != "tool" or (role, before) in _OUT_OF_ORDER:
            raise RowError(
                place,
                "with roles out of order",
                f"the roles are {shown(roles)}, where {role!r} follows {before!r}",
                "After an optional system message, user (or tool) and assistant take turns; merge what one of them said"
                " in two messages.",
            )
    is_answered = bool(turns) and turns[-1] == "assistant"
    if not turns or is_answered != (ends_with == "assistant"):
        wanted = "an assistant's" if ends_with == "assistant" else "a user's"
        raise RowError(
            place,
            f"that do not end with {wanted} turn",
            f"the roles are {shown(roles)}, and the last one must be {wanted}",
            "Leave out what comes after it, or the record.",
        )


_OUT_OF_ORDER = {("assistant", "system"), ("tool", "system"), ("tool", "user")}


def to_tools(value: Any, place: str) -> list[dict[str, Any]]:
    """Returns the descriptions of functions in `tools`, a list or its text in JSON, as chat templates take them."""
    if isinstance(value, str) and value.strip():
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(
            place, "whose 'tools' are no list", f"'tools' is {shown(value)}", "Expected a list of descriptions."
        )
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
