"""`tools`: the model calls typed Python functions until it answers without a call."""

from typing import Annotated

from msgspec import Meta

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome, Resume
from headway.rollout_workers.agents.tools.threads import EpisodeThread
from headway.rollout_workers.agents.tools.toolbox import Count, Toolbox, ToolLimits, ToolTurns
from headway.rollout_workers.agents.tools.typed_functions import FunctionTool, TypedFunction, check_names

from .base import outcome, resume_of


class ToolsOptions(ToolLimits, frozen=True, kw_only=True):
    """The tools of the agent, and its limits."""

    tools: Annotated[list[str], Meta(min_length=1)]
    """Import paths of Python functions with types, plain or `async`. Their docstrings are read by the model."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 20
    """The most answers of the model."""
    resume: Resume = "replay"
    """restart: where a tool has effects that outlast the episode, or draws at random. A tool may say so itself, by an
    attribute `resume`."""


class ToolsAgent(Agent):
    """Offers the same functions to each episode. The run's reward functions score the last answer."""

    def __init__(self, options: ToolsOptions, roots: ImportRoots, where: str) -> None:
        self._options = options
        key = f"{where}.tools"
        loaded = [roots.load(path, key) for path in options.tools]
        self._functions = [TypedFunction(function, key) for function in loaded]
        check_names(self._functions, key)
        says = [resume_of(function, key, options.resume) for function in loaded]
        self.resume: Resume = "restart" if "restart" in says else options.resume

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        thread = EpisodeThread()
        toolbox = Toolbox([FunctionTool(one, thread) for one in self._functions], self._options)
        try:
            messages = begin(task.messages, self._options.system_prompt)
            await ToolTurns(episode, messages, toolbox, self._options.max_turns).answer()
        finally:
            await thread.close()
        return outcome(None, toolbox.measures)
