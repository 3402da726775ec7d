"""Turns of a model with tools, up to an answer that calls none. What goes wrong in a call, the model reads."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.rollout_workers.agents.conversation import Message, Tool, ToolCall
from headway.rollout_workers.agents.episode import AgentEpisode

CALLS_AT_ONCE = 8
"""The most tool calls of one turn that are carried out."""


class ToolError(Exception):
    """A tool cannot do what is asked; the model reads why."""


@dataclass(frozen=True, kw_only=True)
class TextTool:
    """A function of texts, and what the model reads about it."""

    name: str
    description: str
    call: Callable[..., str | Awaitable[str]]
    """(one text for each parameter, by name) -> what the model reads. Raises ToolError."""
    parameters: Mapping[str, str]
    """The name of each parameter, and what it means. All are required."""

    @property
    def declared(self) -> Tool:
        """What the model is told, as OpenAI's chat completions have it."""
        properties = {name: {"type": "string", "description": meaning} for name, meaning in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(kw_only=True)
class ToolTurns:
    """The turns of one episode."""

    episode: AgentEpisode
    messages: list[Message]
    """The conversation so far; turns are added to it."""
    tools: Sequence[TextTool]
    max_turns: int
    error_text: str = ""
    """What the model reads of a call that failed; empty: the reason."""
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    is_over: bool = False
    """Whether the model may not answer again: turns or tokens are spent."""
    is_cut: bool = False
    """Whether its last answer was cut off for its length."""

    async def answer(self) -> str | None:
        """Return the model's next answer without a tool call; None if there is none before the episode is over."""
        while self.turns < self.max_turns:
            answered = await self.episode.chat(self.messages, [tool.declared for tool in self.tools])
            if answered.is_over:
                break
            self.turns += 1
            self.messages.append(answered.message)
            if not answered.tool_calls:
                self.is_cut = answered.finish_reason == "length"
                self.is_over = self.is_cut or self.turns == self.max_turns
                return answered.content
            for number, call in enumerate(answered.tool_calls):
                self.messages.append(await self._called(number, call))
        self.is_over = True
        return None

    def measures(self, reward: float) -> dict[str, float]:
        """Return the episode's outcome: its reward, and how the model used tools."""
        return {
            "reward": reward,
            "turns": float(self.turns),
            "tool_calls": float(self.tool_calls),
            "tool_errors": float(self.tool_errors),
        }

    async def _called(self, number: int, call: ToolCall) -> Message:
        self.tool_calls += 1
        try:
            if number >= CALLS_AT_ONCE:
                raise ToolError(f"only {CALLS_AT_ONCE} calls of a turn are carried out")
            says = await self._result(call)
        except ToolError as error:
            self.tool_errors += 1
            says = self.error_text or f"Error: {error}."
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": says}

    async def _result(self, call: ToolCall) -> str:
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            known = ", ".join(tool.name for tool in self.tools)
            raise ToolError(f"there is no tool {call.name[:40]!r}; there are {known}")
        result = tool.call(**_arguments(call, tool))
        return result if isinstance(result, str) else await result


def _arguments(call: ToolCall, tool: TextTool) -> dict[str, str]:
    """Return a text for each parameter. A number stands for its digits, as models often leave the quotes out."""
    try:
        given: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        raise ToolError("the arguments are no JSON") from None
    if not isinstance(given, dict) or set(given) != set(tool.parameters):
        raise ToolError(f"{tool.name} takes {', '.join(tool.parameters) or 'no arguments'}")
    for name, value in given.items():
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ToolError(f"{name} must be text")
    return {name: str(value) for name, value in given.items()}
