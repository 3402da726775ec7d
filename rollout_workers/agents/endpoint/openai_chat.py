"""OpenAI's chat completions, with the fields by which vLLM's clients capture tokens."""

import time
from collections.abc import Iterator
from typing import Any

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session
from headway.rollout_workers.agents.conversation import Message, Tool, assistant_message

from .dialect import Asked, OpenAIErrors, event, token_logprobs
from .fields import (
    NO_EFFECT,
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
from .known_parts import JsonPart

FIELDS = Fields(
    read=names(
        "messages tools tool_choice max_tokens max_completion_tokens stream stream_options logprobs return_token_ids "
        "return_tokens_as_token_ids temperature top_p top_k seed"
    ),
    harmless=names(
        "model user metadata store service_tier parallel_tool_calls reasoning_effort reasoning thinking verbosity "
        "prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier cache_control "
        "cache_salt priority request_id skip_special_tokens spaces_between_special_tokens include_reasoning "
        "include_stop_reason usage provider extra_headers timeout"
    ),
    no_effect=frozenset(NO_EFFECT) - {"stop_sequences", "background"},
    refused={
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prompt_logprobs": "tokens of a prompt have no logprobs here",
        "audio": "the model writes text alone",
        "web_search_options": "offer a function tool that searches",
    },
)
MESSAGE = Fields(
    read=names("role content tool_calls tool_call_id name reasoning_content reasoning"),
    harmless=names(
        "refusal annotations audio function_call cache_control provider_specific_fields reasoning_details "
        "thinking_blocks id status token_ids phase"
    ),
    no_effect=frozenset(),
    refused={"prefix": "an answer cannot be begun by the client", "images": "the model reads text alone"},
)


class OpenAIChat(OpenAIErrors):
    """The dialect of `POST /v1/chat/completions`."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks."""
        fields = FIELDS.check(body, ignores_sampling=ignores_sampling)
        messages = [
            read_message(one, f"messages[{i}]") for i, one in enumerate(items(body.get("messages"), "messages"))
        ]
        if not messages:
            raise CallRefusedError("'messages' is empty", "messages")
        shows_tools = check_tool_choice(fields.get("tool_choice"))
        tools = read_tools(fields.get("tools", []))
        most = [whole_number(fields, name, 1) for name in ("max_completion_tokens", "max_tokens")]
        call = ChatCall(
            messages=messages,
            tools=tools if shows_tools else [],
            max_tokens=min((one for one in most if one is not None), default=None),
            **sampling(fields),
        )
        for name in ("logprobs", "return_token_ids", "return_tokens_as_token_ids"):
            flag(fields, name)
        mapping(fields.get("stream_options", {}), "stream_options")
        return Asked(call=call, streams=flag(fields, "stream"), fields=fields)

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        choice = {"index": 0, "message": {"content": None, "refusal": None, **answer.message}}
        choice |= self._ending(asked, answer, session)
        whole = {**head(answer, session, "chat.completion"), "choices": [choice], "usage": usage(answer)}
        return whole | self._prompt(asked, answer)

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterator[bytes]:
        """Yield the events of a response that streams, in all."""
        start = head(answer, session, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            return {**start, "choices": [choice]}

        yield event(chunk({"role": "assistant", "content": ""}) | self._prompt(asked, answer))
        for part in ("reasoning_content", "content"):
            if answer.message.get(part):
                yield event(chunk({part: answer.message[part]}))
        for i, one in enumerate(answer.message.get("tool_calls") or []):
            yield event(chunk({"tool_calls": [{"index": i, **one}]}))
        yield event(chunk({}, **self._ending(asked, answer, session)))
        if asked.fields.get("stream_options", {}).get("include_usage"):
            yield event({**start, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def _ending(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the fields of a choice that are about the whole answer."""
        ending: dict[str, Any] = {"logprobs": None, "finish_reason": answer.finish_reason}
        if asked.fields.get("logprobs"):
            names_ids = asked.fields.get("return_tokens_as_token_ids", False)
            ending["logprobs"] = token_logprobs(answer, session, names_ids=names_ids)
        if asked.fields.get("return_token_ids"):
            ending["token_ids"] = answer.token_ids
        return ending

    def _prompt(self, asked: Asked, answer: ChatAnswer) -> dict[str, Any]:
        return {"prompt_token_ids": answer.prompt_token_ids} if asked.fields.get("return_token_ids") else {}


def head(answer: ChatAnswer, session: Session, kind: str) -> dict[str, Any]:
    """Return the fields with which each object of a response begins."""
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": session.model}


def usage(answer: ChatAnswer) -> dict[str, int]:
    """Return the numbers of tokens that were read and sampled."""
    read, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def read_message(message: dict[str, Any], where: str) -> Message:
    """Return a message of a request in the shape that sessions take."""
    if not isinstance(message, JsonPart):
        return _message(message, where)
    if message.read is None:
        message.read = _message(message, where)
    return message.read


def _message(message: dict[str, Any], where: str) -> Message:
    fields = MESSAGE.check(message, ignores_sampling=False, path=f"{where}.")
    content = fields.get("content")
    match fields.get("role"):
        case "system" | "developer":
            return {"role": "system", "content": content_text(content, f"{where}.content")}
        case "user":
            return {"role": "user", "content": content_text(content, f"{where}.content")}
        case "tool":
            told = {"role": "tool", "content": content_text(content, f"{where}.content")}
            told["tool_call_id"] = text(fields.get("tool_call_id", ""), f"{where}.tool_call_id")
            return told | ({"name": text(fields["name"], f"{where}.name")} if "name" in fields else {})
        case "assistant":
            return _assistant(fields, content, where)
    raise refusal(f"{where}.role", "it is none of system, developer, user, assistant or tool")


def _assistant(fields: dict[str, Any], content: Any, where: str) -> Message:
    calls = []
    for i, one in enumerate(items(fields.get("tool_calls", []), f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{i}]"
        if one.get("type", "function") != "function":
            raise refusal(f"{place}.type", "there are function calls alone")
        function = mapping(one.get("function"), f"{place}.function")
        calls.append(function_call(one.get("id"), function.get("name"), function.get("arguments"), place))
    reasoning = text(fields.get("reasoning_content", fields.get("reasoning", "")), f"{where}.reasoning_content")
    return assistant_message("" if content is None else content_text(content, f"{where}.content"), reasoning, calls)


def read_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request in the shape that sessions take."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(items(tools, "tools"))]


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if isinstance(tool, JsonPart) and tool.read is not None:
        return tool.read
    if tool.get("type", "function") != "function":
        raise refusal(f"{where}.type", "the model can call functions alone")
    found = function_tool(mapping(tool.get("function"), f"{where}.function"), f"{where}.function")
    if isinstance(tool, JsonPart):
        tool.read = found
    return found
