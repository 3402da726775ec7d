"""Requests whose parts are known already are read as any others."""

import json
from typing import Any

import msgspec
import pytest

from headway.rollout_workers.agents.calls import CallRefusedError
from headway.rollout_workers.agents.endpoint.dialect import Dialect
from headway.rollout_workers.agents.endpoint.known_parts import MOST_BYTES, KnownParts
from headway.rollout_workers.agents.endpoint.native import Native
from headway.rollout_workers.agents.endpoint.openai_chat import OpenAIChat

USER, SYSTEM = {"role": "user", "content": "é \n"}, {"role": "system", "content": [{"type": "text", "text": "x"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"a": 1}}}


@pytest.mark.parametrize("dialect", [Native(), OpenAIChat()])
def test_a_known_part_is_read_as_a_new_one(dialect: Dialect) -> None:
    known = KnownParts()
    answer = {"role": "assistant", "content": "hm", "tool_calls": []}
    bodies: list[dict[str, Any]] = [
        {"messages": [SYSTEM, USER], "tools": [TOOL]},
        {"messages": [SYSTEM, USER, answer, USER], "tools": [TOOL, TOOL], "max_tokens": 3},
        {"messages": [USER]},
        {"messages": [SYSTEM, USER, answer, USER], "tools": []},
    ]
    for body in bodies:
        encoded = json.dumps(body).encode()
        asked = dialect.read(known.decoded(encoded), ignores_sampling=False)
        assert asked.call == dialect.read(json.loads(encoded), ignores_sampling=False).call


def test_what_was_read_is_not_read_again_unless_the_json_differs() -> None:
    known, chat = KnownParts(), OpenAIChat()

    def read(*messages: str) -> list[Any]:
        body = f'{{"messages": [{", ".join(messages)}]}}'.encode()
        return chat.read(known.decoded(body), ignores_sampling=False).call.messages

    user, other = json.dumps(USER), json.dumps(USER | {"content": "other"})
    first, again, changed = read(user)[0], read(user, user), read(other)[0]
    assert first is again[0] is again[1]
    assert changed["content"] == "other"


def test_nothing_of_a_long_request_is_kept() -> None:
    known, user = KnownParts(), json.dumps(USER).encode()
    known.decoded(b'{"messages": [%b]}%b' % (user, b" " * MOST_BYTES))
    assert not known._newest
    known.decoded(b'{"messages": [%b]}' % user)
    assert len(known._newest) == 1
    assert not known._before


def test_a_part_that_was_refused_is_refused_again() -> None:
    known, chat = KnownParts(), OpenAIChat()
    for _ in range(2):
        for wrong in ('[{"role": "nobody"}]', "[1]", "7", "null", '[{"messages": []}]'):
            with pytest.raises(CallRefusedError):
                chat.read(known.decoded(f'{{"messages": {wrong}}}'.encode()), ignores_sampling=False)


@pytest.mark.parametrize(
    "body", ["", "[]", '{"messages": [{]}', '{"messages": [{"a": "\\ud800"}]}', '{"a": 1e}', "{} {}"]
)
def test_what_is_no_json_object_is_an_error(body: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        KnownParts().decoded(body.encode())


def test_an_object_that_is_both_a_message_and_a_tool_is_read_as_each() -> None:
    both = {**USER, **TOOL}
    for name in ("messages", "tools"):
        known = KnownParts()
        body = known.decoded(json.dumps({"messages": [both], "tools": [both]}).encode())
        assert body[name] == [both]
        assert body["messages"][0] is not body["tools"][0]
