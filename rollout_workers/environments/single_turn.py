"""Episodes of one turn, whose reward is the score of the reward functions."""

import msgspec

from .base import Episode, Step


class SingleTurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no options."""


class SingleTurn:
    """Ends every episode after its first turn."""

    max_turns = 1

    async def step(self, episode: Episode) -> Step:
        """End the episode, with the score as its reward."""
        return Step(reward=episode.score)

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""
