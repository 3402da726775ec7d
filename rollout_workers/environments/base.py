"""The seam between a worker and whatever answers a turn."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from broker.schema import Prompt


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode up to the end of a turn."""

    prompt: Prompt
    answers: tuple[str, ...]
    """What the model said, turn by turn, without the tokens that ended the turns; the last is to be answered."""
    rewards: tuple[float, ...] = ()
    """Of the turns before the last."""
    score: float
    """What the reward functions give for the last answer: their weighted sum."""
    finish_reason: str
    """How the last turn ended: "stop", or "length" where nothing may follow it."""
    room: int
    """Tokens that are left for what is said and for all that the model answers."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment makes of a turn."""

    reward: float
    """For this turn alone; an episode's reward is the sum over its turns."""
    components: Mapping[str, float] = {}
    """Further measures of the episode, for people; those of its last turn are kept."""
    says: str | tuple[int, ...] = ""
    """What the model reads next, as text or as token ids; empty: the episode ends."""


class Environment(Protocol):
    """Answers turns, many at a time. It keeps nothing between two of them: another worker may play the next."""

    max_turns: int
    """The most turns of an episode. After its last one a sample needs no engine any more, whatever is said."""

    async def step(self, episode: Episode) -> Step:
        """The answer to the last turn; never blocks the event loop.

        What leaves the model no room for a token is not said, and the episode ends. Raises UnscoredError where this
        sample is to be given up, RewardError where the worker is.
        """
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...
