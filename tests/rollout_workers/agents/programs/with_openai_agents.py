"""Works a task out with openai-agents, the package `agents`, as it is: the environment tells it of the endpoint.

The first argument is the interface that it speaks, chat_completions or responses.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_default_openai_api, set_tracing_disabled

from headway.rollout_workers.agents.tasks.calculator import calculated
from headway.rollout_workers.agents.tools.toolbox import ToolError

MOST_TURNS = 6
task = json.loads(Path(os.environ["HEADWAY_TASK"]).read_text())


def calculate(expression: str) -> str:
    """Work out an expression of numbers.

    Args:
        expression: such as 12*(3+4)
    """
    try:
        return calculated(expression, task["extra_info"].get("modulus", 0))
    except ToolError:
        return "?"


async def main() -> None:
    """Play, and print the outcome."""
    agent = Agent(name="calculating", tools=[function_tool(calculate)], model="policy")
    try:
        result = await Runner.run(agent, task["text"], max_turns=MOST_TURNS)
        is_right = str(result.final_output).rpartition("#")[2] == str(task["ground_truth"])
    except MaxTurnsExceeded:
        is_right = False
    print(json.dumps({"reward": float(is_right)}))


set_tracing_disabled(True)
set_default_openai_api(sys.argv[1])
asyncio.run(main())
