"""Anthropic's messages."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session
from headway.rollout_workers.agents.conversation import Message, Tool, assistant_message

from .dialect import Asked, event
from .fields import (
    Fields,
    check_tool_choice,
    content_text,
    flag,
    function_call,
    function_tool,
    items,
    mapping,
    names,
    part_text,
    refusal,
    sampling,
    text,
    whole_number,
)
from .problems import Problem

RAW = "_raw_arguments"
"""The one field of a tool's input where the model wrote arguments that are no JSON object: their text."""

FIELDS = Fields(
    read=names("messages system tools tool_choice max_tokens stream output_config temperature top_p top_k"),
    harmless=names(
        "model metadata service_tier thinking cache_control context_management betas speed inference_geo diagnostics "
        "user_profile_id workspace_id"
    ),
    no_effect=frozenset({"stop_sequences"}),
    refused={
        "output_format": "the model's answers follow no schema",
        "container": "there are no containers here",
        "mcp_servers": "the agent is to call the servers of tools itself",
    },
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicMessages:
    """The dialect of `POST /v1/messages` and of `POST /v1/messages/count_tokens`."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks."""
        fields = FIELDS.check(body, ignores_sampling=ignores_sampling)
        if mapping(fields.get("output_config", {}), "output_config").get("format") is not None:
            raise refusal("output_config.format", "the model's answers follow no schema")
        shows_tools = check_tool_choice(fields.get("tool_choice"))
        tools = read_tools(fields.get("tools", []))
        call = ChatCall(
            messages=read_messages(fields),
            tools=tools if shows_tools else [],
            max_tokens=whole_number(fields, "max_tokens", 1),
            **sampling(fields),
        )
        return Asked(call=call, streams=flag(fields, "stream"))

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        ending = {"content": blocks(answer.message), "stop_reason": STOP_REASONS[answer.finish_reason]}
        return head(answer, session) | ending | {"usage": usage(answer)}

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterator[bytes]:
        """Yield the events of a response that streams, in all."""
        yield _event("message_start", message=head(answer, session) | {"usage": usage(answer) | {"output_tokens": 0}})
        calls = {one["id"]: one["function"]["arguments"] for one in answer.message.get("tool_calls") or []}
        for i, block in enumerate(blocks(answer.message)):
            match block["type"]:
                case "thinking":
                    empty = block | {"thinking": ""}
                    delta = {"type": "thinking_delta", "thinking": block["thinking"]}
                case "text":
                    empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
                case _:
                    raw = RAW in block["input"]
                    written = json.dumps(block["input"]) if raw else calls[block["id"]]
                    empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
            yield _event("content_block_start", index=i, content_block=empty)
            yield _event("content_block_delta", index=i, delta=delta)
            yield _event("content_block_stop", index=i)
        ended = {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=usage(answer))
        yield _event("message_stop")

    def error(self, problem: Problem) -> dict[str, Any]:
        """Return the body of a response that tells a problem."""
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": problem.message}}

    def error_event(self, problem: Problem) -> bytes:
        """Return the event that tells a problem in a response that has begun."""
        return event(self.error(problem), "error")


def _event(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def head(answer: ChatAnswer, session: Session) -> dict[str, Any]:
    """Return a message without content."""
    start: dict[str, Any] = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": session.model}
    return start | {"content": [], "stop_reason": None, "stop_sequence": None}


def usage(answer: ChatAnswer) -> dict[str, int]:
    """Return the numbers of tokens that were read and sampled."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": len(answer.prompt_token_ids), **cached, "output_tokens": len(answer.token_ids)}


def blocks(message: Message) -> list[dict[str, Any]]:
    """Return the content of an answer, which is never empty."""
    found: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        found.append({"type": "text", "text": message.get("content") or ""})
    for one in calls:
        function = one["function"]
        found.append({"type": "tool_use", "id": one["id"], "name": function["name"]})
        found[-1]["input"] = input_of(function["arguments"])
    return found


def input_of(arguments: str) -> dict[str, Any]:
    """Return a tool's arguments as an object; where they are none, one that has their text."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {RAW: arguments}


def arguments_of(value: dict[str, Any]) -> str:
    """Return the text of a tool's arguments from their object: as most models write it, where they were JSON."""
    raw = value.get(RAW)
    if list(value) == [RAW] and isinstance(raw, str):
        return raw
    return json.dumps(value, ensure_ascii=False)


def read_messages(fields: dict[str, Any]) -> list[Message]:
    """Return the messages of a request, its system prompt first, in the shape that sessions take."""
    system = fields.get("system")
    found: list[Message] = [] if not system else [{"role": "system", "content": content_text(system, "system")}]
    last = ""
    for i, message in enumerate(items(fields.get("messages"), "messages")):
        where, last = f"messages[{i}].content", message.get("role", "")
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else items(content, where)
        match last:
            case "user":
                found += _user(parts, where)
            case "assistant":
                found.append(_assistant(parts, where))
            case "system":
                found.append({"role": "system", "content": content_text(parts, where)})
            case _:
                raise refusal(f"messages[{i}].role", "it is none of user, assistant or system")
    if not last:
        raise CallRefusedError("'messages' is empty", "messages")
    if last == "assistant":
        raise refusal("messages", "the last one is the assistant's, and an answer cannot be begun by the client")
    return found


def _user(parts: list[dict[str, Any]], where: str) -> list[Message]:
    """Return a user's message, of which each result of a tool is a message of its own."""
    found = list[Message]()
    for i, part in enumerate(parts):
        if part.get("type") == "tool_result":
            content = content_text(part.get("content") or "", f"{where}[{i}].content")
            call = text(part.get("tool_use_id"), f"{where}[{i}].tool_use_id")
            found.append({"role": "tool", "content": content, "tool_call_id": call})
            continue
        said = part_text(part, f"{where}[{i}]")
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n{said}"
        else:
            found.append({"role": "user", "content": said})
    return found


def _assistant(parts: list[dict[str, Any]], where: str) -> Message:
    said, thought, calls = list[str](), list[str](), list[dict[str, Any]]()
    for i, part in enumerate(parts):
        place = f"{where}[{i}]"
        match part.get("type"):
            case "thinking":
                thought.append(text(part.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                pass  # another model's, which nobody can read
            case "tool_use":
                arguments = arguments_of(mapping(part.get("input"), f"{place}.input"))
                calls.append(function_call(part.get("id"), part.get("name"), arguments, place))
            case _:
                said.append(part_text(part, place))
    return assistant_message("\n".join(said), "\n".join(thought), calls)


def read_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request in the shape that sessions take."""
    found = []
    for i, tool in enumerate(items(tools, "tools")):
        if tool.get("type") not in (None, "custom"):
            raise refusal(f"tools[{i}].type", "the model can call tools alone that the client runs")
        found.append(function_tool(tool, f"tools[{i}]", "input_schema"))
    return found
