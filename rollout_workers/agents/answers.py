"""Turns as their agents get them."""

from msgspec.structs import replace

from .calls import ChatAnswer, ChatCall
from .conversation import ParsedAnswer
from .tree import RecordedTurn


def answer_of(turn: RecordedTurn, parsed: ParsedAnswer) -> ChatAnswer:
    """Return a turn as its agent gets it. Ids of tool calls are unique in the episode, and the same when the turn is
    repeated."""
    named = tuple(replace(one, id=f"call_{turn.number}_{place}") for place, one in enumerate(parsed.tool_calls))
    is_cut = turn.call.finish_reason == "length"
    return ChatAnswer(
        message=replace(parsed, tool_calls=named).message(),
        finish_reason="length" if is_cut else "tool_calls" if named else "stop",
        prompt_token_ids=turn.context,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        id=f"turn-{turn.number}",
    )


def spent_answer(context: list[int]) -> ChatAnswer:
    """Return the answer of an episode that has no turn or token left."""
    message = {"role": "assistant", "content": ""}
    return ChatAnswer(
        message=message, finish_reason="length", prompt_token_ids=context, token_ids=[], logprobs=[], id="turn--1"
    )


def turn_number(answer_id: str) -> int:
    """Return the number of the turn that an answer is; -1 for that of a spent episode."""
    return int(answer_id.removeprefix("turn-"))


def conversation_after(call: ChatCall, parsed: ParsedAnswer) -> str:
    """Return the digest of a call's conversation with its answer; "" for a call by tokens."""
    return "" if call.prompt_token_ids is not None else call.links[-1].then(parsed.message()).said.hex()
