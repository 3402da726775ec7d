"""The clients of OpenAI and Anthropic speak to the endpoint unchanged, and OpenEnv grades it.

`make test-agents` runs these with all of them, in an environment of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headway.rollout_workers.agents.conversation import ParsedAnswer, ToolCall
from headway.rollout_workers.agents.endpoint.connections import EndpointSettings
from headway.rollout_workers.agents.endpoint.server import Endpoint

from .scripted import TOOL, ScriptedSessions
from .sessions import Attempt, Engine
from .test_endpoint import Bench, opened, until

openai: Any = pytest.importorskip("openai", reason="OpenAI's client is not installed: make test-agents")
anthropic: Any = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: make test-agents")

HI: Any = [{"role": "user", "content": "hi"}]
BROKEN = ParsedAnswer(
    content="so",
    reasoning="why",
    tool_calls=(ToolCall(id="c1", name="f", arguments='{"a": '), ToolCall(id="c2", name="f", arguments='{"b":  2}')),
)
SCHEMA = {"type": "object", "properties": {}}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened(EndpointSettings(quiet_s=0.01)) as one:
        yield one


@pytest.fixture
async def open_ai(bench: Bench) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=bench.base, api_key="one") as client:
        yield client


@pytest.fixture
async def claude(bench: Bench) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=bench.base.removesuffix("/v1"), api_key="one") as client:
        yield client


async def test_openai_chats_with_tools(bench: Bench, open_ai: Any) -> None:
    messages = [*HI]
    answer = await open_ai.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, call.function.arguments) == (
        "tool_calls",
        "look_up",
        '{"key": "x"}',
    )
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "found"}]
    answer = await open_ai.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "answer 2"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
    first = bench.one.speak(bench.one.calls[0], 1).message()
    assert bench.one.calls[1].messages == [*HI, first, {"role": "tool", "content": "found", "tool_call_id": "call_1"}]


async def test_openai_streams_chats(bench: Bench, open_ai: Any) -> None:
    bench.one.speak = lambda call, number: BROKEN
    more: dict[str, Any] = {"stream_options": {"include_usage": True}, "logprobs": True}
    async with open_ai.chat.completions.stream(model="x", messages=HI, tools=[TOOL], **more) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("so", "why")
    assert [one.function.arguments for one in choice.message.tool_calls] == ['{"a": ', '{"b":  2}']
    assert [one.logprob for one in choice.logprobs.content] == [-0.5, -0.25]
    assert answer.usage.total_tokens == 5


async def test_openai_captures_tokens(bench: Bench, open_ai: Any) -> None:
    """The client's own accumulation of a stream drops fields that it does not know; its chunks have them."""
    asked = {"model": "x", "messages": HI, "extra_body": {"return_token_ids": True}}
    answer = await open_ai.chat.completions.create(**asked)
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == ([1, 2, 3], [104, 105])
    chunks = [chunk async for chunk in await open_ai.chat.completions.create(**asked, stream=True)]
    assert chunks[0].prompt_token_ids == [1, 2, 3]
    assert chunks[-1].choices[0].token_ids == [104, 105]


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_responds(bench: Bench, open_ai: Any, streams: bool) -> None:
    bench.one.speak = lambda call, number: BROKEN
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
    asked = {"model": "x", "instructions": "be it", "input": [*HI], "tools": [tool], "store": False}
    if streams:
        async with open_ai.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    else:
        answer = await open_ai.responses.create(**asked)
    assert (answer.status, answer.output_text) == ("completed", "so")
    assert [one.type for one in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[2].arguments == '{"a": '
    again = [*HI, *answer.output, {"type": "function_call_output", "call_id": "c1", "output": "found"}]
    await open_ai.responses.create(**asked | {"input": again})
    assert bench.one.calls[1].messages[2] == BROKEN.message()


@pytest.mark.parametrize("streams", [False, True])
async def test_anthropic_sends_messages(bench: Bench, claude: Any, streams: bool) -> None:
    bench.one.speak = lambda call, number: BROKEN
    tool = {"name": "f", "input_schema": SCHEMA}
    asked = {"model": "x", "max_tokens": 100, "system": "be it", "messages": [*HI], "tools": [tool]}
    if streams:
        async with claude.messages.stream(**asked) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await claude.messages.create(**asked)
    assert [one.type for one in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [one.input for one in answer.content[2:]] == [{"_raw_arguments": '{"a": '}, {"b": 2}]
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == ("tool_use", 3, 2)
    results = [{"type": "tool_result", "tool_use_id": one, "content": "found"} for one in ("c1", "c2")]
    again = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    await claude.messages.create(**asked | {"messages": again})
    repeated = bench.one.calls[1].messages[2]
    assert repeated["tool_calls"][0] == BROKEN.message()["tool_calls"][0]
    assert json.loads(repeated["tool_calls"][1]["function"]["arguments"]) == {"b": 2}
    assert [one["tool_call_id"] for one in bench.one.calls[1].messages[3:]] == ["c1", "c2"]


async def test_clients_list_models_and_count_tokens(bench: Bench, open_ai: Any, claude: Any) -> None:
    assert [one.id async for one in open_ai.models.list()] == ["tiny"]
    assert [one.id async for one in claude.models.list()] == ["tiny"]
    assert (await claude.messages.count_tokens(model="x", messages=HI)).input_tokens == 7
    assert not bench.one.calls


async def test_clients_raise_their_own_errors(bench: Bench, open_ai: Any, claude: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await open_ai.chat.completions.create(model="x", messages=HI, n=3)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as refused:
        await open_ai.chat.completions.create(model="x", messages=HI, temperature=0)
    assert refused.value.param == "temperature"
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        await claude.messages.create(model="x", max_tokens=9, messages=HI, stop_sequences=["x"])
    del bench.sessions.by_name["one"]
    with pytest.raises(openai.APIStatusError) as ended:
        await open_ai.chat.completions.create(model="x", messages=HI)
    assert ended.value.status_code == 410
    assert bench.endpoint.counts == {"refused": 3, "ended": 1}, "no client tries again what is refused"


async def test_a_client_that_runs_out_of_patience_gets_its_answer_by_retrying(bench: Bench, open_ai: Any) -> None:
    bench.one.gate = asyncio.Event()
    impatient = open_ai.with_options(timeout=1.0, max_retries=8)
    asking = asyncio.create_task(impatient.chat.completions.create(model="x", messages=HI))
    await until(lambda: bench.endpoint.counts.get("disconnected", 0) >= 1)
    bench.one.gate.set()
    assert (await asking).choices[0].message.content == "answer 1"
    assert len(bench.one.calls) == 1
    assert bench.endpoint.counts["retries"] >= 1


async def test_openai_waits_where_the_endpoint_has_no_room(open_ai: Any) -> None:
    """This endpoint has room for one call of an episode. What waits for room is a sample of its own, and no retry."""
    async with opened(EndpointSettings(session_calls=1)) as bench:
        bench.one.gate = asyncio.Event()
        client = open_ai.with_options(base_url=bench.base, max_retries=5)
        calls = [client.chat.completions.create(model="x", messages=HI, user=str(i)) for i in range(2)]
        asking = [asyncio.create_task(call) for call in calls]
        await until(lambda: bench.endpoint.counts.get("busy", 0) >= 1)
        bench.one.gate.set()
        answers = await asyncio.gather(*asking)
    assert sorted(one.choices[0].message.content for one in answers) == ["answer 1", "answer 2"]


ARGUMENTS = '{"b":2, "a": [1.0, "ü"]}'
"""As no client writes it that has read it."""


async def play_chat(client: Any, url: str) -> None:
    async with client.AsyncOpenAI(base_url=url, api_key="x") as talk:
        messages = [*HI]
        for _ in range(3):
            answer = await talk.chat.completions.create(model="x", messages=messages, tools=[TOOL])
            messages.append(answer.choices[0].message)
            for call in answer.choices[0].message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "found"})


async def play_responses(client: Any, url: str) -> None:
    tool = {"type": "function", **TOOL["function"]}
    async with client.AsyncOpenAI(base_url=url, api_key="x") as talk:
        said: list[Any] = [*HI]
        for _ in range(3):
            async with talk.responses.stream(model="x", input=said, tools=[tool]) as stream:
                answer = await stream.get_final_response()
            for one in answer.output:
                said.append(one.model_dump())
                if one.type == "function_call":
                    said.append({"type": "function_call_output", "call_id": one.call_id, "output": "found"})


async def play_messages(client: Any, url: str) -> None:
    tool = {"name": "look_up", "input_schema": SCHEMA}
    async with client.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x") as talk:
        said: list[Any] = [*HI]
        for _ in range(3):
            async with talk.messages.stream(model="x", max_tokens=99, messages=said, tools=[tool]) as stream:
                answer = await stream.get_final_message()
            calls = [one.id for one in answer.content if one.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one, "content": "found"} for one in calls]
            said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


@pytest.mark.parametrize(
    ("client", "play"), [(openai, play_chat), (openai, play_responses), (anthropic, play_messages)]
)
async def test_an_unchanged_agent_goes_on_with_the_tokens_that_were_sampled(client: Any, play: Any) -> None:
    engine = Engine(f"!look_up {ARGUMENTS}", "!look_up {broken", "done")
    attempt, sessions = Attempt(engine), ScriptedSessions()
    sessions.by_name["one"] = attempt.session
    endpoint = await Endpoint.start(sessions)
    try:
        await play(client, endpoint.url_of("one"))
    finally:
        await endpoint.close()
    assert attempt.session.counts["turns"] == 3
    assert attempt.session.counts["forks"] == 0
    for number in (1, 2):
        before = attempt.recorder.turn(number - 1)
        row = [*before.context, *before.token_ids]
        assert engine.asked[number].prompt_tokens[: len(row)] == row


@pytest.mark.parametrize("ignores", [False, True])
async def test_openenv_grades_the_endpoint_as_one_that_captures_tokens(ignores: bool) -> None:
    pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-agents")
    from openenv.core.harness.capture import validate_llm

    async with opened(EndpointSettings(ignore_sampling=ignores)) as bench:
        report = await asyncio.to_thread(validate_llm, bench.base, "tiny")
    assert (report.ok, report.capture_level, report.tool_support) == (True, "tokens", "ok")
    assert report.param_fixes == ([] if ignores else ["dropped temperature"])
    assert not any("FATAL" in finding for finding in report.findings)
