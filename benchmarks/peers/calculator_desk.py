"""The calculator as a class whose public methods are tools, which Headway and TRL both take as they are."""

from typing import Any

from headway.rollout_workers.agents.tasks.calculator import calculated
from headway.rollout_workers.agents.tools.toolbox import ToolError


class CalculatorDesk:
    """One episode's calculator. The answer is scored by the race's reward, so it returns none."""

    def __init__(self) -> None:
        self._modulus = 0

    def reset(self, modulus: int = 0, **_row: Any) -> None:
        """Take the number below which all results are, which the row of the episode names."""
        self._modulus = modulus

    def calculate(self, expression: str) -> str:
        """Works out an expression of numbers, + - * / and parentheses.

        Args:
            expression: such as 12*(3+4)
        """
        try:
            return calculated(expression, self._modulus)
        except ToolError as error:
            return f"Error: {error}"
