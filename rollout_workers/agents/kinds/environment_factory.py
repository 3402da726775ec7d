"""`environment_factory`: a class in the shape of TRL's, whose public methods are the tools of an episode.

    class Desk:
        def reset(self, **row) -> str | None: ...      # what it returns follows the last message of the user
        def look_up(self, order: int) -> str: ...      # a tool, as every other public method
        def get_reward(self) -> float: ...             # optional: the episode's reward
        def close(self) -> None: ...                   # optional, and no tool

Each episode has an object of its own, whose plain methods all run in one thread.
"""

import inspect
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message, begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread, made_in_thread
from headway.rollout_workers.agents.tools.toolbox import Count, Seconds, Toolbox, ToolLimits, ToolTurns
from headway.rollout_workers.agents.tools.typed_functions import FunctionTool, TypedFunction

from .base import ShapeError, accepted, check_methods, finite, outcome, resume_of, row_of

NO_TOOLS = ("reset", "get_reward", "close")


class EnvironmentFactoryOptions(ToolLimits, frozen=True, kw_only=True):
    """The class, and its limits."""

    factory: str
    """The class, or a function that makes an object of it: package.module:Name."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """What it is called with, by name."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 20
    """The most answers of the model."""
    reset_s: Seconds = 60.0
    """A reset, or a reward, that takes longer is given up, with its episode."""


class EnvironmentFactoryAgent(Agent):
    """Makes an object for each episode."""

    def __init__(self, options: EnvironmentFactoryOptions, roots: ImportRoots, where: str) -> None:
        self._options = options
        self._key = f"{where}.factory"
        self._factory = roots.load(options.factory, self._key)
        self.resume = resume_of(self._factory, self._key)
        if isinstance(self._factory, type):
            check_methods(self._factory, ["reset"], "an environment", self._key)
            if not _tool_names(self._factory):
                raise ConfigError(f"{self._key}: {self._factory.__name__} has no public method that could be a tool.")

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        options = self._options
        async with made_in_thread(self._factory, options.reset_s, options.arguments) as (own, thread):
            check_methods(own, ["reset"], "an environment", self._key)
            tools = [TypedFunction(getattr(own, name), self._key, name) for name in _tool_names(own)]
            toolbox = Toolbox([FunctionTool(tool, thread) for tool in tools], options)
            given = accepted(own.reset, row_of(task), f"{options.factory}: reset")
            said = await thread.call(own.reset, deadline_s=options.reset_s, **given)
            messages = self._with(begin(task.messages, options.system_prompt), said)
            await ToolTurns(episode, messages, toolbox, options.max_turns).answer()
            return outcome(await self._reward(own, thread), toolbox.measures)

    def _with(self, messages: list[Message], said: Any) -> list[Message]:
        """Return the messages with what `reset` returned behind the last one of the user."""
        if said is None or said == "":
            return messages
        if not isinstance(said, str):
            raise ShapeError(f"{self._options.factory}: reset returned {said!r:.200}; it must return text or None.")
        for message in reversed(messages):
            if message["role"] == "user" and isinstance(message.get("content"), str):
                message["content"] += said
                return messages
        return [*messages, {"role": "user", "content": said}]

    async def _reward(self, own: Any, thread: EpisodeThread) -> float | None:
        if not callable(getattr(own, "get_reward", None)):
            return None
        reward = await thread.call(own.get_reward, deadline_s=self._options.reset_s)
        return None if reward is None else finite(reward, f"{self._options.factory}: what get_reward returned")


def _tool_names(own: object) -> list[str]:
    """Return the names of the public methods, in the order of their definition."""
    kind = own if isinstance(own, type) else type(own)
    names = dict.fromkeys(name for base in reversed(kind.__mro__) if base is not object for name in vars(base))
    is_tool = (name for name in names if not name.startswith("_") and name not in NO_TOOLS)
    return [name for name in is_tool if inspect.isroutine(inspect.getattr_static(kind, name, None))]
