"""Headway's own dialect: the fields of a ChatCall, and those of an AgentAnswer."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session
from headway.rollout_workers.agents.conversation import ToolCall
from headway.rollout_workers.agents.episode import AgentAnswer

from .dialect import Asked, OpenAIErrors
from .fields import SAMPLING, items, refusal
from .openai_chat import read_message, read_tools

Body = TypeVar("Body")
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class Rewarded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /reward`."""

    reward: float


class Finished(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /finish`."""

    reward: float | None = None
    measures: dict[str, float] = {}


def rewarded(body: dict[str, Any]) -> float:
    """Return the reward of a turn."""
    return finite(_converted(body, Rewarded).reward)


def finished(body: dict[str, Any]) -> tuple[float | None, dict[str, float]]:
    """Return the reward of an episode, and what was measured beside it."""
    found = _converted(body, Finished)
    for value in (*found.measures.values(), *([] if found.reward is None else [found.reward])):
        finite(value)
    return found.reward, found.measures


def finite(value: float) -> float:
    """Return a number that must be finite."""
    if not math.isfinite(value):
        raise CallRefusedError("'reward' and 'measures' must be finite", "reward")
    return value


def token_ids(value: Any, where: str) -> list[int]:
    """Return a value that must be a list of tokens."""
    try:
        found: list[int] = msgspec.convert(value, TokenIds)
    except msgspec.ValidationError as error:
        raise CallRefusedError(f"'{where}' must be a list of token ids: {error}", where) from error
    if not found:
        raise CallRefusedError(f"'{where}' is empty", where)
    return found


class Native(OpenAIErrors):
    """The dialect of `POST /turn`."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks."""
        body = {name: value for name, value in body.items() if not (ignores_sampling and name in SAMPLING)}
        for name in body:
            if name not in ChatCall.__struct_fields__:
                raise refusal(name[:100], f"a turn has the fields {', '.join(ChatCall.__struct_fields__)}")
        messages, tools = (items(body.pop(name, []), name) for name in ("messages", "tools"))
        call = _converted(body, ChatCall)
        if bool(messages) == (call.prompt_token_ids is not None):
            raise CallRefusedError("a turn has either messages or prompt_token_ids", "messages")
        if call.prompt_token_ids is not None:
            token_ids(call.prompt_token_ids, "prompt_token_ids")
        if call.max_tokens is not None and call.max_tokens < 1:
            raise CallRefusedError("'max_tokens' must be an integer from 1 on", "max_tokens")
        read = [read_message(one, f"messages[{i}]") for i, one in enumerate(messages)]
        return Asked(call=msgspec.structs.replace(call, messages=read, tools=read_tools(tools)))

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        message = answer.message
        calls = (ToolCall(id=one["id"], **one["function"]) for one in message.get("tool_calls") or [])
        turn = AgentAnswer(
            content=message.get("content") or "",
            tool_calls=tuple(calls),
            message=message,
            finish_reason=answer.finish_reason,
            prompt_token_ids=answer.prompt_token_ids,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
        )
        return msgspec.structs.asdict(turn)

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterable[bytes]:
        """Refuse: no request of this dialect streams."""
        raise CallRefusedError("a turn comes in one response", "stream")


def _converted(body: dict[str, Any], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise CallRefusedError(f"the request is of another shape: {error}") from error
