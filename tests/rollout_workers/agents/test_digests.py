"""Digests of conversations that grow, go back or change are those of the conversations alone."""

from typing import Any

import pytest

from headway.rollout_workers.agents.calls import ChatCall
from headway.rollout_workers.agents.digests import ConversationDigests

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"a": 1, "b": True}}}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return says("assistant", None, tool_calls=[call])


def test_a_digest_is_the_same_whatever_was_digested_before() -> None:
    one = [says("user", "1"), called('{"a": 1}'), says("tool", "2"), says("user", "3")]
    conversations = [one[:1], one[:3], one, one[:2], [*one[:2], says("tool", "4")], [says("user", "9"), *one[1:]], []]
    digests = ConversationDigests()
    for messages in conversations:
        for tools in ([], [TOOL], [TOOL | {"type": "x"}], [TOOL]):
            alone = ChatCall(messages=messages, tools=tools)
            links = digests.links([dict(one) for one in messages], tools)
            assert [one[1:] for one in links] == [one[1:] for one in alone.links]


def test_what_is_asked_names_every_difference_and_what_is_said_does_not() -> None:
    given = called('{"a": 1, "b": 2}')
    told, _, other = (
        ConversationDigests().links([says("user", "x"), one], [])[-1]
        for one in (given, says("assistant", "y"), called('{"b":2,"a":1}') | {"content": "", "id": "z"})
    )
    assert told.said == other.said
    assert told.asked != other.asked
    assert ConversationDigests().links([says("user", "x"), called("{")], [])[-1].said != told.said


@pytest.mark.parametrize("value", ['"\\ud83d"', f"1{'0' * 99}", "1e999", "NaN", "[" * 50_000])
def test_whatever_a_model_writes_as_arguments_has_a_digest(value: str) -> None:
    one, same, other = (
        ConversationDigests().links([called(arguments)], [])[-1].said
        for arguments in (f'{{"a":{value}}}', f'{{"a":{value}}}', '{"a":null}')
    )
    assert one == same != other


def test_half_of_a_surrogate_pair_says_the_same_however_it_is_written() -> None:
    told = {
        ConversationDigests().links([called(text)], [])[-1].said for text in (r'{"a":"\ud83d"}', r'{ "a": "\uD83D" }')
    }
    assert len(told) == 1


def test_calls_that_ask_for_something_else_have_digests_of_their_own() -> None:
    messages = [says("user", "x")]
    calls = [
        ChatCall(messages=messages),
        ChatCall(messages=messages, max_tokens=3),
        ChatCall(messages=messages, role="auxiliary"),
        ChatCall(messages=messages, tools=[TOOL]),
        ChatCall(messages=[*messages, *messages]),
        ChatCall(prompt_token_ids=[1]),
        ChatCall(prompt_token_ids=[]),
        ChatCall(),
    ]
    assert len({call.digest for call in calls}) == len(calls)
