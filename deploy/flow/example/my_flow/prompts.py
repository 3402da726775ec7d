"""A source of prompts: sums of two small numbers."""

import random
from collections.abc import Iterator

from headway.learner.data.prompts.base import Item

HELD_OUT_ONE_IN = 8


class Sums:
    """All sums `a+b=` with a and b up to `largest`. One in eight is for evaluation and is never trained."""

    def __init__(self, *, path: str, seed: int, largest: int = 9) -> None:
        """`path` is `prompts.path` of the recipe, which sums do not need; `largest` is one of `prompts.options`."""
        self._seed = seed
        everything = list(all_sums(largest))
        self._held_out = everything[::HELD_OUT_ONE_IN]
        self._train = [item for item in everything if item not in self._held_out]

    @property
    def size(self) -> int:
        return len(self._train)

    def train(self, epoch: int, position: int) -> Item:
        """Each epoch has an order of its own, which is the same in every process."""
        order = list(range(self.size))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return self._train[order[position]]

    def held_out(self, count: int) -> list[Item]:
        return self._held_out[:count]


def all_sums(largest: int) -> Iterator[Item]:
    for a in range(largest + 1):
        for b in range(largest + 1):
            yield Item(
                content=f"{a}+{b}=", ground_truth=str(a + b), data_source="sums", extra_info={"largest": largest}
            )
