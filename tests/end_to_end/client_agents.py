"""Agents as people have them: they talk to a client of OpenAI's or Anthropic's, and not to their episode."""

import json
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from headway.rollout_workers.agents.tasks.calculator import calculated, calculator
from headway.rollout_workers.agents.tools.toolbox import ToolError

MOST_TURNS = 6
TOOL = calculator().schema


def worked_out(arguments: Any, task: Any) -> str:
    """Return what the calculator says."""
    try:
        return calculated(str(arguments["expression"]), task.extra_info["modulus"])
    except (ToolError, KeyError, TypeError):
        return "?"


def is_right(answer: str, task: Any) -> float:
    return float(answer.rpartition("#")[2] == str(task.ground_truth))


async def with_openai(episode: Any, task: Any) -> float:
    """Call a tool until the model answers without."""
    messages: list[Any] = list(task.messages)
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for _ in range(MOST_TURNS):
            completion = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])  # type: ignore[list-item]
            answer: Any = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return is_right(answer.content or "", task)
            for call in answer.tool_calls:
                says = worked_out(json.loads(call.function.arguments), task)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": says})
    return 0.0


async def with_anthropic(episode: Any, task: Any) -> float:
    """Call a tool until the model answers without; streamed."""
    messages: list[Any] = list(task.messages)
    function = TOOL["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    url = episode.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=episode.api_key) as client:
        for _ in range(MOST_TURNS):
            asked: Any = {"model": "any", "max_tokens": 64, "messages": messages, "tools": [tool]}
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [one.model_dump() for one in answer.content]})
            uses = [one for one in answer.content if one.type == "tool_use"]
            if not uses:
                return is_right("".join(one.text for one in answer.content if one.type == "text"), task)
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": worked_out(one.input, task)} for one in uses
            ]
            messages.append({"role": "user", "content": results})
    return 0.0
