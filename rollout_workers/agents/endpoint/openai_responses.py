"""OpenAI's Responses, as far as agents use them that keep the conversation themselves."""

import time
from collections.abc import Iterator
from typing import Any

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session
from headway.rollout_workers.agents.conversation import Message, Tool, assistant_message

from .dialect import Asked, OpenAIErrors, event
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
    refusal,
    sampling,
    text,
    whole_number,
)
from .problems import Problem

STATELESS = "the endpoint keeps no conversation for the client, so send the whole of it as input"
FIELDS = Fields(
    read=names("input instructions tools tool_choice max_output_tokens stream text include temperature top_p"),
    harmless=names(
        "model user metadata store service_tier parallel_tool_calls reasoning prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier stream_options client_metadata truncation max_tool_calls"
    ),
    no_effect=frozenset({"background", "top_logprobs"}),
    refused={"previous_response_id": STATELESS, "conversation": STATELESS, "prompt": "send its text as input"},
)
PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
TOOL_REMEDY = "The model can call functions alone; switch the agent's own search, shell and patch tools to functions"


class OpenAIResponses(OpenAIErrors):
    """The dialect of `POST /v1/responses`."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks."""
        fields = FIELDS.check(body, ignores_sampling=ignores_sampling)
        wanted = mapping(fields.get("text", {}), "text").get("format") or {}
        if mapping(wanted, "text.format").get("type", "text") != "text":
            raise refusal("text.format", "the model's answers follow no schema")
        if fields.get("include", []) not in ([], ["reasoning.encrypted_content"]):
            raise refusal("include", "an answer has nothing of what it names")
        shows_tools = check_tool_choice(fields.get("tool_choice"))
        tools = read_tools(fields.get("tools", []))
        call = ChatCall(
            messages=read_messages(fields),
            tools=tools if shows_tools else [],
            max_tokens=whole_number(fields, "max_output_tokens", 1),
            **sampling(fields),
        )
        return Asked(call=call, streams=flag(fields, "stream"), fields=fields)

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        is_cut = answer.finish_reason == "length"
        read, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }
        ending = {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output_items(answer),
            "usage": usage,
        }
        return self._begun(asked, answer, session) | ending

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterator[bytes]:
        """Yield the events of a response that streams, in all."""
        begun = self._begun(asked, answer, session)
        whole = self.answer(asked, answer, session) | {"created_at": begun["created_at"]}
        told: list[dict[str, Any]] = [{"type": f"response.{kind}", "response": begun} for kind in CREATED]
        for i, item in enumerate(whole["output"]):
            told += _item_events(item, i)
        told.append({"type": f"response.{whole['status']}", "response": whole})
        for number, one in enumerate(told):
            yield event({**one, "sequence_number": number}, one["type"])

    def error_event(self, problem: Problem) -> bytes:
        """Return the event that tells a problem in a response that has begun."""
        told = self.error(problem)["error"]
        kept = {name: told[name] for name in ("code", "message", "param")}
        return event({"type": "error", **kept, "sequence_number": 0}, "error")

    def _begun(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return a response that has no output yet."""
        fields = asked.fields
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": {},
            "model": session.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": fields.get("temperature"),
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": fields.get("tools", []),
            "top_p": fields.get("top_p"),
            "usage": None,
        }


CREATED = ("created", "in_progress")


def output_items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Return the items of an answer."""
    message, found = answer.message, list[dict[str, Any]]()
    calls = message.get("tool_calls") or []
    if message.get("reasoning_content"):
        thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        found.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": thought})
    if message.get("content") or not calls:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        said: dict[str, Any] = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
        found.append(said | {"status": "incomplete" if answer.finish_reason == "length" else "completed"})
    for i, one in enumerate(calls):
        item = {"type": "function_call", "id": f"fc_{answer.id}_{i}", "call_id": one["id"], **one["function"]}
        found.append(item | {"status": "completed"})
    return found


def _item_events(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the events of one item: that it begins, its parts, and that it is whole."""
    place = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any]
    more: dict[str, Any]
    if item["type"] == "function_call":
        empty, arguments = {"arguments": ""}, item["arguments"]
        kind = "response.function_call_arguments"
        inner = [{"type": f"{kind}.delta", **place, "delta": arguments}]
        inner.append({"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]})
    else:
        (part,) = item["content"]
        empty, place = {"content": []}, {**place, "content_index": 0}
        kind = "response.output_text" if part["type"] == "output_text" else "response.reasoning_text"
        more = {"logprobs": []} if part["type"] == "output_text" else {}
        inner = [{"type": "response.content_part.added", **place, "part": {**part, "text": ""}}]
        inner.append({"type": f"{kind}.delta", **place, "delta": part["text"], **more})
        inner.append({"type": f"{kind}.done", **place, "text": part["text"], **more})
        inner.append({"type": "response.content_part.done", **place, "part": part})
    begun = {**item, **empty, "status": "in_progress"}
    added = {"type": "response.output_item.added", "output_index": index, "item": begun}
    return [added, *inner, {"type": "response.output_item.done", "output_index": index, "item": item}]


def read_messages(fields: dict[str, Any]) -> list[Message]:
    """Return the instructions and the input of a request in the shape that sessions take."""
    found = list[Message]()
    if fields.get("instructions"):
        found.append({"role": "system", "content": text(fields["instructions"], "instructions")})
    given = fields.get("input")
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for i, item in enumerate(items(given, "input")):
        _add_item(found, item, f"input[{i}]")
    if not given:
        raise CallRefusedError("'input' is empty", "input")
    return found


def _add_item(found: list[Message], item: dict[str, Any], where: str) -> None:
    """Add an item of the input. The items of one answer make one message of the assistant."""
    match item.get("type", "message"):
        case "message":
            content = content_text(item.get("content"), f"{where}.content", PARTS)
            match item.get("role"):
                case "assistant":
                    _add_assistant(found, content=content)
                case "user":
                    found.append({"role": "user", "content": content})
                case "system" | "developer":
                    found.append({"role": "system", "content": content})
                case _:
                    raise refusal(f"{where}.role", "it is none of user, assistant, system or developer")
        case "reasoning":
            content = content_text(item.get("content") or item.get("summary") or "", f"{where}.content", PARTS)
            _add_assistant(found, reasoning=content)
        case "function_call":
            call = function_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            _add_assistant(found, call=call)
        case "function_call_output":
            content = content_text(item.get("output"), f"{where}.output", PARTS)
            call_id = text(item.get("call_id"), f"{where}.call_id")
            found.append({"role": "tool", "content": content, "tool_call_id": call_id})
        case other:
            raise refusal(f"{where}.type", f"there are no items of type {str(other)[:40]!r} here")


def _add_assistant(
    found: list[Message], *, reasoning: str = "", content: str = "", call: dict[str, Any] | None = None
) -> None:
    """Add a part of an answer: reasoning comes before content, and content before calls of tools."""
    last = found[-1] if found and found[-1]["role"] == "assistant" else assistant_message("", "", [])
    calls, said, thought = last.get("tool_calls", []), last["content"] or "", last.get("reasoning_content", "")
    begins_anew = (reasoning and (thought or said or calls)) or (call is None and not reasoning and (said or calls))
    if last is (found[-1] if found else None) and not begins_anew:
        found.pop()
    else:
        calls, said, thought = [], "", ""
    more = [] if call is None else [call]
    found.append(assistant_message(said or content, thought or reasoning, [*calls, *more]))


def read_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request in the shape that sessions take."""
    found = []
    for i, tool in enumerate(items(tools, "tools")):
        if tool.get("type") != "function":
            raise refusal(f"tools[{i}].type", f"{str(tool.get('type'))[:40]!r} is no function. {TOOL_REMEDY}")
        found.append(function_tool(tool, f"tools[{i}]"))
    return found
