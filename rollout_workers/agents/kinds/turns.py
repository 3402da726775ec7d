"""The loop of an environment that answers each turn of the model."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import AgentAnswer, AgentEpisode
from headway.rollout_workers.agents.tools.toolbox import cut, text_of

from .base import ShapeError, messages_of


class TurnReply(NamedTuple):
    """What an environment answers to a turn."""

    messages: list[Message]
    reward: float | None
    """Of this turn; None: it has none of its own."""
    is_done: bool


async def play(
    episode: AgentEpisode,
    messages: list[Message],
    reply: Callable[[AgentAnswer], Awaitable[TurnReply]],
    max_turns: int,
    what: str,
    tools: Any = (),
) -> int:
    """Let the model and the environment answer each other; return the number of the model's answers. `messages` grows.

    The text of an answer that was cut still counts as an action, and is the last one."""
    for turn in range(max_turns):
        answer = await episode.chat(messages, tools=tools)
        if answer.is_over:
            return turn
        messages.append(answer.message)
        said = await reply(answer)
        if said.reward is not None:
            await episode.reward(said.reward)
        messages.extend(said.messages)
        if said.is_done or answer.finish_reason == "length":
            return turn + 1
        if not said.messages:
            raise ShapeError(f"{what}: it says nothing, and yet the episode is not done.")
    return max_turns


def observed(observation: Any, most: int, what: str) -> list[Message]:
    """Return an observation as what the model reads next: messages as they are, text and other data as the user's."""
    if observation is None or observation == "":
        return []
    if isinstance(observation, list) and any(isinstance(one, Mapping) and "role" in one for one in observation):
        return messages_of(observation, what)
    return [{"role": "user", "content": cut(text_of(observation), most)}]
