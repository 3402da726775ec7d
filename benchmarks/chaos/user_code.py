"""A user's own code: the prompts, and a reward that hangs, raises and ends its process now and then.

It imports little, because every worker and every learner starts processes of its own for it.
"""

import os
import random
import time

from headway.learner.data.prompts.base import Item

PROMPT_TOKENS = 8
HANGS, EXITS, RAISES = 0.002, 0.002, 0.002
"""The shares of calls that hang, exit and raise."""
HANGS_S = 3600.0
_HELD_OUT = 10_000_000


class FinitePrompts:
    """A source of so many prompts, each of which is its own number."""

    def __init__(self, path: str, seed: int, size: int) -> None:
        self.size: int | None = size

    def train(self, epoch: int, position: int) -> Item:
        """Return the position in eight digits, which are eight tokens."""
        return Item(content=text_of(position), ground_truth="", data_source="chaos")

    def held_out(self, count: int) -> list[Item]:
        """Return numbers beyond those of any trial."""
        return [self.train(0, _HELD_OUT + number) for number in range(count)]


def text_of(position: int) -> str:
    """Return the prompt's text."""
    return f"{position:0{PROMPT_TOKENS}d}"


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Return a reward that differs within a group; no test depends on it."""
    return random.random()


def erratic_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Return the same reward where the call does not fail."""
    drawn = random.random()
    if drawn < HANGS:
        time.sleep(HANGS_S)
    elif drawn < HANGS + EXITS:
        os._exit(3)
    elif drawn < HANGS + EXITS + RAISES:
        raise ValueError("a judge that is away")
    return random.random()
