"""Works a task out with smolagents as it is: the environment tells it of the endpoint.

The first argument is the kind of its agent, ToolCallingAgent or CodeAgent. Both cut and force answers by fields of
their calls, which no training can honour; the package's own REMOVE_PARAMETER leaves them away.
"""

import json
import os
import sys
from pathlib import Path

import smolagents

from headway.rollout_workers.agents.tasks.calculator import calculated


def calculate(expression: str) -> str:
    """Work out an expression of numbers.

    Args:
        expression: such as 12*(3+4)
    """
    return calculated(expression)


task = json.loads(Path(os.environ["HEADWAY_TASK"]).read_text())
model = smolagents.OpenAIModel("policy", stop=smolagents.REMOVE_PARAMETER, tool_choice=smolagents.REMOVE_PARAMETER)
agent = getattr(smolagents, sys.argv[1])(tools=[smolagents.tool(calculate)], model=model, max_steps=4)
print(json.dumps({"reward": float(str(agent.run(task["text"])) == str(task["ground_truth"]))}))
