"""The seam between a worker and the environment that answers a turn."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from headway.broker.schema import Prompt


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode up to the end of a turn."""

    prompt: Prompt
    """The task, with the fields of its row."""
    answers: tuple[str, ...]
    """The model's answers, turn by turn, without the tokens that ended the turns. The last one is to be answered."""
    rewards: tuple[float, ...] = ()
    """The rewards of the turns before the last."""
    score: float
    """The weighted sum of the reward functions for the last answer."""
    finish_reason: str
    """The end of the last turn: "stop", or "length" if no further turn may follow."""
    room: int
    """Tokens that are left for what the environment says and for all that the model answers."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to a turn."""

    reward: float
    """The reward of this turn alone; an episode's reward is the sum over its turns."""
    components: Mapping[str, float] = {}
    """Further measures of the episode, for people to read. Those of its last turn are kept."""
    says: str | tuple[int, ...] = ""
    """Text or token ids that the model reads next; empty: the episode ends."""


class Environment(Protocol):
    """Answers turns, many at a time. It keeps nothing between two turns: another worker may play the next one."""

    max_turns: int
    """The most turns of an episode. A sample needs no engine after its last turn, whatever the environment says."""

    async def step(self, episode: Episode) -> Step:
        """Answer the last turn, without blocking the event loop.

        If the answer leaves the model no room for a token, it is not said and the episode ends. Raises UnscoredError if
        this sample is to be given up, RewardError if the worker is to end.
        """
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...
