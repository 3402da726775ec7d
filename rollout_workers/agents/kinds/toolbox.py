"""Tools that a model calls in an episode. Whatever becomes of a call, the model is told, and it is counted."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean
from headway.rollout_workers.agents.conversation import Message, Tool, ToolCall
from headway.rollout_workers.agents.episode import AgentAnswer, AgentEpisode

from .base import CallDeadlineError, cut
from .threads import EpisodeThread, ExitedError
from .typed_functions import TypedFunction

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


class ArgumentsError(Exception):
    """The arguments of a call cannot be read."""


class ToolFailedError(Exception):
    """A tool has answered that it failed."""


class OpenTool(Protocol):
    """A tool of one episode."""

    name: str
    schema: Tool

    async def call(self, arguments: str, deadline_s: float) -> Any:
        """Return the result. Raises ArgumentsError, CallDeadlineError, and whatever the tool raises."""
        ...


class FunctionTool:
    """A typed Python function, called in the episode's thread."""

    def __init__(self, function: TypedFunction, thread: EpisodeThread) -> None:
        self.name, self.schema = function.name, function.schema
        self._function = function
        self._thread = thread

    async def call(self, arguments: str, deadline_s: float) -> Any:
        """See OpenTool."""
        try:
            given = self._function.read(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ArgumentsError(str(error)) from error
        return await self._thread.call(self._function.function, deadline_s=deadline_s, **given)


class Toolbox:
    """The tools of one episode, and how often what became of their calls."""

    def __init__(self, tools: Iterable[OpenTool], limits: ToolLimits) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._limits = limits
        self._counts = Counter[str]()
        self._tool_s = 0.0
        self.schemas = [tool.schema for tool in self._tools.values()]

    @property
    def measures(self) -> dict[str, float]:
        """The counts of the episode's calls, by what became of them, and the seconds that they took."""
        names = ("tool_calls", "tool_errors", "tool_timeouts", "unknown_tools", "broken_arguments")
        return {**{name: float(self._counts[name]) for name in names}, "tool_s": self._tool_s}

    async def answer(self, call: ToolCall) -> Message:
        """Return the tool's message for a call, which is an error's where it failed."""
        self._counts["tool_calls"] += 1
        started_s = time.monotonic()
        try:
            content = await self._content(call)
        finally:
            self._tool_s += time.monotonic() - started_s
        said = cut(content, self._limits.max_tool_chars)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}

    async def _content(self, call: ToolCall) -> str:
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
        except (ToolFailedError, ExitedError) as error:
            return self._failed("tool_errors", f"{call.name} {error}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model is told whatever a tool raises
            return self._failed("tool_errors", f"{call.name} raised {type(error).__name__}: {error}")

    def _failed(self, count: str, reason: str) -> str:
        self._counts[count] += 1
        return f"Error: {reason[:MOST_ERROR]}"


def text_of(result: Any) -> str:
    """Return a tool's result as the model reads it: text as it is, other plain data as JSON."""
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        return str(result)


def check_names(tools: Iterable[TypedFunction], where: str) -> None:
    """Raise ConfigError where two tools have one name."""
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise ConfigError(f"{where}: {count} tools have the name {name}; give each its own.")


async def converse(
    episode: AgentEpisode, messages: Sequence[Message], toolbox: Toolbox, max_turns: int
) -> list[Message]:
    """Let the model answer and call tools until an answer calls none, is cut, or is the last one that it may give.
    Return the whole conversation."""
    said = list(messages)
    for _ in range(max_turns):
        answer: AgentAnswer = await episode.chat(said, tools=toolbox.schemas)
        if answer.is_over:
            break
        said.append(answer.message)
        if answer.finish_reason == "length" or not answer.tool_calls:
            break
        for call in answer.tool_calls:
            said.append(await toolbox.answer(call))
    return said
