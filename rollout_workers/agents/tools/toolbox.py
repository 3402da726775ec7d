"""Tools that a model calls in an episode. Whatever becomes of a call, the model is told, and it is counted."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from headway.broker.errors import CallDeadlineError
from headway.broker.user_code.kinds import did_you_mean
from headway.rollout_workers.agents.conversation import Message, Tool, ToolCall
from headway.rollout_workers.agents.episode import AgentEpisode

from .threads import ExitedError, error_text

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
MOST_ERROR = 1000
"""The most characters of an error that the model is told."""


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an episode's tool calls."""

    tool_s: Seconds = 60.0
    """A call that takes longer is given up."""
    max_tool_chars: Count = 20_000
    """The rest of a longer result is cut off."""
    max_calls: Count = 32
    """Further calls of one answer are not carried out."""


class ArgumentsError(Exception):
    """The arguments of a call cannot be read."""


class ToolError(Exception):
    """A tool cannot do what is asked; the model reads why."""


class OpenTool(Protocol):
    """A tool of one episode."""

    name: str
    schema: Tool

    async def call(self, arguments: str, deadline_s: float) -> Any:
        """Return the result. Raises ArgumentsError, CallDeadlineError, ToolError, and whatever the tool raises."""
        ...


class Toolbox:
    """The tools of one episode, and how often what became of their calls."""

    def __init__(self, tools: Iterable[OpenTool], limits: ToolLimits = ToolLimits(), error_text: str = "") -> None:  # noqa: B008 - frozen
        """`error_text`: what the model reads of each call that failed; empty: the reason."""
        self._tools = {tool.name: tool for tool in tools}
        self._limits = limits
        self._error_text = error_text
        self._counts = Counter[str]()
        self.schemas = [tool.schema for tool in self._tools.values()]

    @property
    def measures(self) -> dict[str, float]:
        """The counts of the episode's calls, by what became of them."""
        names = ("tool_calls", "tool_errors", "tool_timeouts", "unknown_tools", "broken_arguments")
        return {name: float(self._counts[name]) for name in names}

    async def answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the tools' messages for the calls of an answer, which are errors' where they failed."""
        return [await self._answer(call, number) for number, call in enumerate(calls)]

    async def _answer(self, call: ToolCall, number: int) -> Message:
        self._counts["tool_calls"] += 1
        said = cut(await self._content(call, number), self._limits.max_tool_chars)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}

    async def _content(self, call: ToolCall, number: int) -> str:
        if number >= self._limits.max_calls:
            return self._failed("tool_errors", f"only {self._limits.max_calls} calls of an answer are carried out")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            near = did_you_mean(call.name[:100], self._tools) or "."
            return self._failed("unknown_tools", f"there is no tool {call.name[:100]!r}{near} Tools: {known}.")
        try:
            return text_of(await tool.call(call.arguments, self._limits.tool_s))
        except ArgumentsError as error:
            return self._failed("broken_arguments", f"the arguments of {call.name} cannot be read: {error}")
        except CallDeadlineError as error:
            return self._failed("tool_timeouts", f"{call.name} {error}")
        except ExitedError as error:
            return self._failed("tool_errors", f"{call.name} {error}")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the model is told whatever it is
            return self._failed("tool_errors", _reason(error, call.name))

    def _failed(self, count: str, reason: str) -> str:
        self._counts[count] += 1
        return self._error_text or f"Error: {reason[:MOST_ERROR]}"


def _reason(error: BaseException, name: str) -> str:
    """Return why a tool failed: in its own words, or with the error's type."""
    if isinstance(error, ToolError):
        with suppress(Exception):  # of a subclass with a method of its own
            return str(error)
    return f"{name} raised {error_text(error)}"


def text_of(result: Any) -> str:
    """Return a tool's result as the model reads it: text as it is, other plain data as JSON."""
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        return str(result)


def cut(text: str, most: int) -> str:
    """Return a text with at most so many characters, and a note where it was longer; half a surrogate pair, which no
    JSON carries, becomes a question mark."""
    said = text if len(text) <= most else f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"
    return said.encode(errors="replace").decode()


class ToolTurns:
    """The turns of one episode in which the model answers or calls tools."""

    def __init__(self, episode: AgentEpisode, messages: Sequence[Message], toolbox: Toolbox, max_turns: int) -> None:
        self._episode = episode
        self._toolbox = toolbox
        self._max_turns = max_turns
        self.messages = list(messages)
        """The conversation so far, to which the answers and the tools' messages are added."""
        self.turns = 0
        self.is_cut = False
        """Whether the last answer was cut for its length."""
        self.is_over = False
        """Whether the model may not answer again: its last answer was cut, or turns or tokens are spent."""

    async def answer(self) -> str | None:
        """Return the model's next answer without a tool call; None if there is none before the episode is over.

        An answer that was cut ends the episode, and its calls are not carried out: nobody knows what was to follow."""
        while not self.is_over and self.turns < self._max_turns:
            answer = await self._episode.chat(self.messages, self._toolbox.schemas)
            if answer.is_over:
                break
            self.turns += 1
            self.messages.append(answer.message)
            self.is_cut = answer.finish_reason == "length"
            self.is_over = self.is_cut or self.turns == self._max_turns
            if not answer.tool_calls:
                return answer.content
            if not self.is_cut:
                self.messages += await self._toolbox.answers(answer.tool_calls)
        self.is_over = True
        return None
