"""Each dialect reads conversations and answers alike, in its clients' shapes, and refuses what it cannot honour."""

import json
from typing import Any

import pytest

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer
from headway.rollout_workers.agents.conversation import Message, ParsedAnswer, ToolCall
from headway.rollout_workers.agents.endpoint.anthropic_messages import AnthropicMessages
from headway.rollout_workers.agents.endpoint.dialect import Asked, Dialect
from headway.rollout_workers.agents.endpoint.native import Native
from headway.rollout_workers.agents.endpoint.openai_chat import OpenAIChat
from headway.rollout_workers.agents.endpoint.openai_responses import OpenAIResponses
from headway.rollout_workers.agents.endpoint.vllm_generate import VllmGenerate
from headway.rollout_workers.agents.episode import AgentEpisode

from .scripted import TOOL, ScriptedSession
from .test_endpoint import HELLO, Bench, bench  # noqa: F401 - a fixture

USER = [{"role": "user", "content": "hi"}]
SMALLEST: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat/completions": (OpenAIChat(), {"messages": USER}),
    "messages": (AnthropicMessages(), {"messages": USER, "max_tokens": 9}),
    "responses": (OpenAIResponses(), {"input": "hi"}),
    "inference/v1/generate": (VllmGenerate(), {"token_ids": [1, 2], "sampling_params": {}}),
    "turn": (Native(), {"messages": USER}),
}
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}


def read(path: str, ignores_sampling: bool = False, **more: Any) -> Asked:
    dialect, smallest = SMALLEST[path]
    return dialect.read(smallest | more, ignores_sampling=ignores_sampling)


def answer_of(parsed: ParsedAnswer) -> ChatAnswer:
    return ChatAnswer(
        message=parsed.message(),
        finish_reason="tool_calls" if parsed.tool_calls else "stop",
        prompt_token_ids=[1, 2, 3],
        token_ids=[104, 105],
        logprobs=[-0.5, -0.25],
        id="a1",
    )


def test_chat_reads_every_kind_of_message() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1'}}
    asked = read(
        "chat/completions",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None, "reasoning": "why"},
            {"role": "tool", "content": "found", "tool_call_id": "c1"},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}],
        max_tokens=50,
        max_completion_tokens=40,
    )
    assert asked.call.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]
    assert asked.call.tools == [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    assert asked.call.max_tokens == 40


def test_messages_read_system_prompts_and_results_of_tools() -> None:
    asked = read(
        "messages",
        system=[{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "it"}],
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "why", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "ü"}},
                    {"type": "tool_use", "id": "c2", "name": "f", "input": {"_raw_arguments": '{"a"'}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "x"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    {"type": "text", "text": "go"},
                    {"type": "text", "text": "on"},
                ],
            },
        ],
        tools=[{"name": "f", "description": "d", "input_schema": PARAMETERS}],
    )
    arguments = ['{"a": "ü"}', '{"a"']
    assert asked.call.messages == [
        {"role": "system", "content": "be\nit"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "why",
            "tool_calls": [
                {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": one}}
                for i, one in enumerate(arguments, 1)
            ],
        },
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "go\non"},
    ]
    function = {"name": "f", "description": "d", "parameters": PARAMETERS}
    assert asked.call.tools == [{"type": "function", "function": function}]


def test_responses_join_the_items_of_an_answer() -> None:
    def called(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}

    said = [{"type": "output_text", "text": "so", "annotations": []}]
    asked = read(
        "responses",
        instructions="be it",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
            {"type": "message", "role": "assistant", "content": said},
            called(1),
            called(2),
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
            called(3),
            {"type": "message", "role": "assistant", "content": "more"},
        ],
        include=["reasoning.encrypted_content"],
        store=False,
        reasoning={"effort": "high"},
        parallel_tool_calls=False,
    )

    def call(number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    whole = {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": [call(1), call(2)]}
    assert asked.call.messages == [
        {"role": "system", "content": "be it"},
        {"role": "user", "content": "hi"},
        whole,
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "y", "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "tool_calls": [call(3)]},
        {"role": "assistant", "content": "more"},
    ]


ANSWERS = [
    ParsedAnswer(content="text"),
    ParsedAnswer(content=""),
    ParsedAnswer(content="text", reasoning="why"),
    ParsedAnswer(content="", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a": 1}'),)),
    ParsedAnswer(
        content="text",
        reasoning="why",
        tool_calls=(
            ToolCall(id="c1", name="f", arguments='{"a": '),
            ToolCall(id="c2", name="", arguments="[1]"),
            ToolCall(id="c3", name="f", arguments=""),
        ),
    ),
]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("parsed", ANSWERS)
def test_an_answer_that_is_sent_back_is_the_message_that_it_was(path: str, parsed: ParsedAnswer) -> None:
    dialect, smallest = SMALLEST[path]
    answer, asked = answer_of(parsed), dialect.read(smallest, ignores_sampling=False)
    told = dialect.answer(asked, answer, ScriptedSession())
    told = json.loads(json.dumps(told))
    more: list[Any]
    match path:
        case "chat/completions":
            more, where = [told["choices"][0]["message"], *USER], "messages"
        case "messages":
            more, where = [{"role": "assistant", "content": told["content"]}, *USER], "messages"
        case _:
            more, where = [*told["output"], {"role": "user", "content": "hi"}], "input"
    again = dialect.read(smallest | {where: [*USER, *more]}, ignores_sampling=False)
    expected: list[Message] = [*USER, answer.message, *USER]
    assert again.call.messages == expected


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"n": 2}, "n"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"stop": ["END"]}, "stop"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("chat/completions", {"temperature": "hot"}, "temperature"),
    ("chat/completions", {"stream": "yes"}, "stream"),
    ("chat/completions", {"guided_json": {}}, "guided_json"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x", "odd": 1}]}, "messages[0].odd"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ("messages", {"stop_sequences": ["END"]}, "stop_sequences"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ("messages", {"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    ("messages", {"odd": 1}, "odd"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"background": True}, "background"),
    ("responses", {"include": ["file_search_call.results"]}, "include"),
    ("responses", {"include": 5}, "include"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ("responses", {"input": []}, "input"),
    ("inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("inference/v1/generate", {"token_ids": [-1]}, "token_ids"),
    ("inference/v1/generate", {"token_ids": ["x"]}, "token_ids"),
    ("inference/v1/generate", {"stream": True}, "stream"),
    ("inference/v1/generate", {"sampling_params": {"n": 4}}, "sampling_params.n"),
    ("inference/v1/generate", {"sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    ("inference/v1/generate", {"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
    ("turn", {"odd": 1}, "odd"),
    ("turn", {"prompt_token_ids": [1]}, "messages"),
    ("turn", {"messages": [], "prompt_token_ids": [-1]}, "prompt_token_ids"),
    ("turn", {"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "more", "field"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_field(path: str, more: dict[str, Any], field: str) -> None:
    with pytest.raises(CallRefusedError) as caught:
        read(path, **more)
    assert caught.value.field == field
    assert field in str(caught.value)


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"n": 1, "stop": None, "presence_penalty": 0, "response_format": {"type": "text"}}),
    ("chat/completions", {"user": "u", "metadata": {}, "store": True, "stream_options": {"include_usage": True}}),
    ("chat/completions", {"tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "low"}),
    ("messages", {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("messages", {"stop_sequences": [], "service_tier": "auto", "tool_choice": {"type": "auto"}}),
    ("responses", {"truncation": "auto", "prompt_cache_key": "k", "text": {"verbosity": "low"}}),
    ("inference/v1/generate", {"sampling_params": {"n": 1, "logprobs": 1, "detokenize": False}, "model": "m"}),
]


@pytest.mark.parametrize(("path", "more"), HARMLESS)
def test_harmless_fields_are_accepted(path: str, more: dict[str, Any]) -> None:
    assert read(path, **more).call == read(path).call


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_tools_are_not_shown_where_none_may_be_called(path: str) -> None:
    tool = {"chat/completions": TOOL, "messages": {"name": "f"}, "responses": {"type": "function", "name": "f"}}[path]
    none = {"type": "none"} if path == "messages" else "none"
    assert read(path, tools=[tool]).call.tools
    assert not read(path, tools=[tool], tool_choice=none).call.tools


@pytest.mark.parametrize("path", list(SMALLEST))
def test_sampling_is_handed_on_or_ignored(path: str) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9} | ({} if path == "responses" else {"top_k": 4})
    more: dict[str, Any] = {"sampling_params": asked} if path.startswith("inference") else asked
    call = read(path, **more).call
    assert (call.temperature, call.top_p, call.top_k) == (0.5, 0.9, asked.get("top_k"))
    assert read(path, ignores_sampling=True, **more).call == read(path).call


def test_sampling_that_differs_from_the_runs_is_refused_with_the_remedy() -> None:
    run: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None}
    read("chat/completions", temperature=1, top_p=1, top_k=-1).call.check_sampling(**run)
    others: list[dict[str, Any]] = [{"temperature": 0}, {"top_p": 0.5}, {"top_k": 7}, {"seed": 3}]
    for other in others:
        with pytest.raises(CallRefusedError, match="ignore_sampling") as caught:
            read("chat/completions", **other).call.check_sampling(**run)
        assert [caught.value.field] == list(other)


async def test_errors_have_the_shape_of_each_dialect(bench: Bench) -> None:  # noqa: F811
    for path, (_, smallest) in SMALLEST.items():
        status, error = await bench.post(path, smallest | {"odd": 1})
        assert status == 400
        if path == "messages":
            assert error["type"] == "error"
            assert (error["error"]["type"], "'odd'" in error["error"]["message"]) == ("invalid_request_error", True)
        else:
            assert error["error"].keys() == {"message", "type", "param", "code"}
            assert (error["error"]["param"], error["error"]["code"]) == ("odd", "unsupported_value")
    assert not bench.one.calls
    assert bench.endpoint.counts == {"refused": len(SMALLEST)}


async def test_chat_answers_the_tokens_that_were_sampled(bench: Bench) -> None:  # noqa: F811
    wanted = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    _, answer = await bench.post("chat/completions", HELLO | wanted)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_ids"] == [104, 105]
    assert choice["logprobs"]["content"] == [
        {"token": "h", "bytes": [104], "logprob": -0.5, "top_logprobs": []},
        {"token": "i", "bytes": [105], "logprob": -0.25, "top_logprobs": []},
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    _, answer = await bench.post("chat/completions")
    assert "prompt_token_ids" not in answer
    assert (answer["choices"][0]["logprobs"], "token_ids" in answer["choices"][0]) == (None, False)


async def test_tokens_are_answered_to_tokens(bench: Bench) -> None:  # noqa: F811
    body = {"request_id": "r1", "token_ids": [9, 8], "sampling_params": {"max_tokens": 5, "logprobs": 0}}
    _, answer = await bench.post("inference/v1/generate", body | {"return_token_ids": True})
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("r1", [9, 8])
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([104, 105], "stop")
    assert choice["logprobs"]["content"][1] == {"token_id": 105, "logprob": -0.25, "top_logprobs": []}
    (call,) = bench.one.calls
    assert (call.prompt_token_ids, call.max_tokens, call.messages) == ([9, 8], 5, [])


async def test_an_episode_of_ours_speaks_to_its_session(bench: Bench) -> None:  # noqa: F811
    async def call(path: str, body: dict[str, Any]) -> Any:
        status, answer = await bench.post(path, body)
        assert status == 200, answer
        return answer

    episode = AgentEpisode(bench.base, "one", call)
    answer = await episode.chat(USER, tools=[TOOL], max_tokens=7)
    assert answer.tool_calls == (ToolCall(id="call_1", name="look_up", arguments='{"key": "x"}'),)
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([104, 105], [-0.5, -0.25], "tool_calls")
    assert (await episode.generate([4, 5])).prompt_token_ids == [4, 5]
    await episode.reward(0.5)
    assert bench.one.rewards == [0.5]
    assert (await bench.post("finish", {"reward": 1, "measures": {"steps": 3}}))[0] == 200
    assert bench.one.finished == (1.0, {"steps": 3.0})
    assert (await bench.post("reward", {"reward": "much"}))[0] == 400
    assert (await bench.post("reward", {}))[0] == 400
    assert (await bench.post("finish", {"odd": 1}))[0] == 400


async def test_models_and_token_counts_are_no_calls(bench: Bench) -> None:  # noqa: F811
    _, counted = await bench.post("messages/count_tokens", {"messages": USER, "system": "be it"})
    assert counted == {"input_tokens": 14}
    async with bench.client.get(f"{bench.base}/models") as response:
        listed = await response.json()
    assert [one["id"] for one in listed["data"]] == ["tiny"]
    async with bench.client.get(f"{bench.base}/models/tiny") as response:
        assert (await response.json())["id"] == "tiny"
    assert not bench.one.calls
    assert bench.endpoint.counts == {"token_counts": 1, "model_lists": 2}
