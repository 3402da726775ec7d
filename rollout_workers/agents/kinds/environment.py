"""`environment`: a class with state, one object for each episode, that answers the model's actions.

    class Maze:
        tools = [...]                                   # optional: schemas of the tools by which the model acts
        def reset(self, task: Task): ...                # -> text or messages, which the model reads first
        def step(self, action): ...                     # -> (observation, reward, done, info)
        def close(self) -> None: ...                    # optional

An action is the text of an answer; or, where the class has `tools`, a ToolCall for each tool that the answer calls.
Gymnasium's shapes are understood too: `reset` may return (observation, info), `step` five values, of which `terminated`
or `truncated` ends the episode. Rewards are those of single turns. All plain methods of an object run in one thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message, Tool, ToolCall, begin
from headway.rollout_workers.agents.episode import Agent, AgentAnswer, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread, made_in_thread
from headway.rollout_workers.agents.tools.toolbox import Count, Seconds, cut, text_of

from .base import ShapeError, check_methods, finite, messages_of, numbers_of, outcome, resume_of, truth
from .turns import TurnReply, observed, play


class EnvironmentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The class, and its limits."""

    environment: str
    """The class, or a function that makes an object of it: package.module:Name."""
    arguments: dict[str, Any] = {}
    """What it is called with, by name."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 50
    """The most answers of the model."""
    step_s: Seconds = 60.0
    """A call that takes longer ends its episode."""
    max_observation_chars: Count = 20_000
    """The rest of a longer observation is cut off."""


class _Step(NamedTuple):
    """What an environment says to an action."""

    observation: Any
    reward: float
    is_done: bool
    measures: dict[str, float]


class EnvironmentAgent(Agent):
    """Makes an object for each episode."""

    def __init__(self, options: EnvironmentOptions, roots: ImportRoots, where: str) -> None:
        self._options = options
        self._key = f"{where}.environment"
        self._make = roots.load(options.environment, self._key)
        self.resume = resume_of(self._make, self._key)
        if isinstance(self._make, type):
            check_methods(self._make, ["reset", "step"], "an environment", self._key)

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        async with made_in_thread(self._make, self._options.step_s, self._options.arguments) as (own, thread):
            check_methods(own, ["reset", "step"], "an environment", self._key)
            return await self._play(own, thread, episode, task)

    async def _play(self, own: Any, thread: EpisodeThread, episode: AgentEpisode, task: AgentTask) -> Outcome:
        tools: Sequence[Tool] = getattr(own, "tools", ())
        first = await thread.call(own.reset, task, deadline_s=self._options.step_s)
        messages = begin(self._first(first, task), self._options.system_prompt)
        measures = dict[str, float]()

        async def reply(answer: AgentAnswer) -> TurnReply:
            messages, reward, is_done = list[Message](), 0.0, False
            for action in _actions(answer, bool(tools)):
                step = _step(await thread.call(own.step, action, deadline_s=self._options.step_s), self._what("step"))
                measures.update(step.measures)
                messages += self._said(step.observation, action)
                reward, is_done = reward + step.reward, step.is_done
                if is_done:
                    break
            return TurnReply(messages, reward, is_done)

        turns = await play(episode, messages, reply, self._options.max_turns, self._what("step"), tools)
        return outcome(0.0, {**measures, "steps": float(turns)}) if turns else None

    def _first(self, said: Any, task: AgentTask) -> list[Message]:
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], Mapping):
            said = said[0]
        if said is None:
            return task.messages
        if isinstance(said, str):
            return [{"role": "user", "content": cut(said, self._options.max_observation_chars)}]
        return messages_of(said, f"{self._what('reset')} returned, which is no text, and it")

    def _said(self, observation: Any, action: str | ToolCall) -> list[Message]:
        """Return an observation as messages."""
        if isinstance(action, ToolCall):
            content = cut(text_of(observation), self._options.max_observation_chars)
            return [{"role": "tool", "tool_call_id": action.id, "name": action.name, "content": content}]
        return observed(observation, self._options.max_observation_chars, f"{self._what('step')}: its observation")

    def _what(self, method: str) -> str:
        return f"{self._options.environment}: {method}"


def _actions(answer: AgentAnswer, has_tools: bool) -> Sequence[str | ToolCall]:
    """Return what an answer does: its tool calls, or its text. Of an answer that was cut, calls are not made."""
    if has_tools and answer.tool_calls and answer.finish_reason == "length":
        return []
    return answer.tool_calls if has_tools and answer.tool_calls else [answer.content]


def _step(result: Any, what: str) -> _Step:
    """Return what `step` returned. Raises ShapeError where it is neither of the two shapes."""
    match result:
        case (observation, reward, done, info):
            pass
        case (observation, reward, terminated, truncated, info):
            is_cut = truth(truncated, f"{what}: truncated")
            done = truth(terminated, f"{what}: terminated") or is_cut
        case _:
            raise ShapeError(
                f"{what} returned {result!r:.200}; it must return (observation, reward, done, info), or"
                " (observation, reward, terminated, truncated, info)."
            )
    return _Step(observation, finite(reward, f"{what}: its reward"), truth(done, f"{what}: done"), numbers_of(info))
