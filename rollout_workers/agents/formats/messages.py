"""Messages as formats take them: checked, with texts alone, whatever an agent's client sent."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.rollout_workers.agents.conversation import FormatError, Message, Tool

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def checked(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages with the fields that formats know, and texts as their contents. Raises FormatError."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not _is_name(function.get("name")):
            raise FormatError(
                f"A tool has no name: {str(tool)[:200]}. Give {{type: function, function: {{name, ...}}}}."
            )
    return [_checked(message, place) for place, message in enumerate(messages)]


def check_asks(messages: Sequence[Message]) -> None:
    """Raise FormatError where there is nothing for the model to answer."""
    if not messages:
        raise FormatError("The conversation has no message.")
    if messages[-1]["role"] == "assistant":
        raise FormatError(
            "The last message is the assistant's, and a model does not go on with an answer. Add what it is to answer."
        )


def with_described_tools(messages: list[Message], tools: Sequence[Tool], how: str) -> list[Message]:
    """Return messages in which the system says which tools there are. `how`: says how to call `{tools}`."""
    if not tools:
        return messages
    described = how.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]


def with_written_calls(message: Message, call: str) -> str:
    """Return a checked message's content, with its calls on the lines behind it. `call`: with {name}, {arguments}."""
    calls = [
        call.format(name=json.dumps(one["name"], ensure_ascii=False), arguments=one["arguments"])
        for one in (each["function"] for each in message.get("tool_calls", ()))
    ]
    return "\n".join([message["content"]] * bool(message["content"]) + calls)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _checked(message: Message, place: int) -> Message:
    role = ROLES.get(message.get("role", "")) if isinstance(message, Mapping) else None
    if role is None:
        raise FormatError(f"Message {place} has no role of {', '.join(ROLES)}: {str(message)[:200]}.")
    found: Message = {"role": role, "content": _text(message.get("content"), place)}
    if role == "tool":
        found |= {key: message[key] for key in ("tool_call_id", "name") if _is_name(message.get(key))}
    if role == "assistant":
        if isinstance(message.get("reasoning_content"), str):
            found["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_call(call, place) for call in calls]
    return found


def _text(content: Any, place: int) -> str:
    """Return a content as text: the lines of its parts where it has several."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"):
            raise FormatError(f"Message {place} has a content that is no text: {str(part)[:200]}.")
    return "\n".join(part["text"] for part in parts)


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise FormatError(f"Message {place} has a tool call without a function's name: {str(call)[:200]}.")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if _is_name(call.get("id")) else made
