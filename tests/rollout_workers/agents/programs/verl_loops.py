"""verl's own loop with tools, which a trainer of verl's would give it."""

from typing import Any

from verl.experimental.agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.agent_loop import ToolListWrap
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool

from headway.rollout_workers.agents.tasks.calculator import calculated


def calculate(expression: str) -> str:
    """Work out an expression of numbers.

    Args:
        expression: such as 12*(3+4)
    """
    return calculated(expression)


function_tool(calculate)


class WithTools(ToolAgentLoop):  # type: ignore[misc]
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, tools=ToolListWrap([FUNCTION_TOOL_REGISTRY["calculate"]]), **named)
