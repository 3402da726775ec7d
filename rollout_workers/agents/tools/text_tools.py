"""A function of texts as a tool, for the tasks that ship."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.rollout_workers.agents.conversation import Tool

from .toolbox import ArgumentsError


class TextTool:
    """A function of texts, and what the model reads about it: an implementation of `toolbox.OpenTool`."""

    def __init__(
        self, function: Callable[..., str | Awaitable[str]], description: str, parameters: Mapping[str, str]
    ) -> None:
        """`function`: (one text for each parameter, by name) -> what the model reads. It ends by itself, and may raise
        ToolError. `parameters`: their names, and what they mean. All are required."""
        self.name = function.__name__
        self._function = function
        self._parameters = tuple(parameters)
        properties = {name: {"type": "string", "description": meaning} for name, meaning in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(parameters)}
        told = {"name": self.name, "description": description, "parameters": schema}
        self.schema: Tool = {"type": "function", "function": told}

    async def call(self, arguments: str, deadline_s: float) -> str:
        """See OpenTool."""
        result = self._function(**self._read(arguments))
        return result if isinstance(result, str) else await result

    def _read(self, arguments: str) -> dict[str, str]:
        """Return a text for each parameter. A number stands for its digits, as models often leave the quotes out."""
        try:
            given: Any = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ArgumentsError("they are no JSON") from None
        if not isinstance(given, dict) or set(given) != set(self._parameters):
            raise ArgumentsError(f"it takes {', '.join(self._parameters) or 'none'}")
        for name, value in given.items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                raise ArgumentsError(f"{name} must be text")
        return {name: str(value) for name, value in given.items()}
