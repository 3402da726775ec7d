"""The environments of Headway: one turn, whose reward is the score of the reward functions, or a second try after a
wrong answer, which trains and measures whether the model corrects its answers.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

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


class SecondTryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The hint after a wrong answer, and the reward of the next answer."""

    hint: Annotated[str, Meta(min_length=1)] = "\nNot right. Try once more:\n"
    """Text that the model reads after a wrong answer; `{prompt}` in it stands for the prompt's text."""
    discount: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Factor of the second answer's score."""
    right_from: Annotated[float, Meta(ge=-1e9, le=1e9)] = 1.0
    """The score from which on an answer counts as right."""


class SecondTry:
    """Plays at most two turns. A right answer ends the episode; a wrong one has no reward if a second one follows.

    `first_try` and `second_try` measure in how many episodes the first answer, or the second, was right.
    """

    max_turns = 2

    def __init__(self, options: SecondTryOptions) -> None:
        self._options = options

    async def step(self, episode: Episode) -> Step:
        """Say the hint after a wrong first answer, if it fits; otherwise end the episode."""
        is_first, is_right = len(episode.answers) == 1, episode.score >= self._options.right_from
        if is_first and not is_right and episode.finish_reason == "stop":
            return Step(reward=0.0, says=self._options.hint.replace("{prompt}", episode.prompt.text))
        return Step(
            reward=episode.score if is_first else self._options.discount * episode.score,
            components={"first_try": float(is_first and is_right), "second_try": float(not is_first and is_right)},
        )

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""
