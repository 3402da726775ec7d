"""One turn, worth what the reward functions give."""

import msgspec

from .base import Episode, Step


class SingleTurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None."""


class SingleTurn:
    """Ends every episode after its first turn."""

    max_turns = 1

    async def step(self, episode: Episode) -> Step:
        """The end, with the score as its reward."""
        return Step(reward=episode.score)

    async def close(self) -> None:
        """Nothing to free."""
