"""The records of each step, from its number alone: a resumed stage needs to know nothing else."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache


class Order:
    """The order in which a stage trains its records: every epoch holds each of them once, in an order of its own."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        epochs: float,
        max_steps: int,
        seed: int,
        batch_tokens: int = 0,
    ) -> None:
        """`lengths`: of each record, its tokens. `batch_tokens`: the most tokens of a step, which then has not
        `batch_size` records but as many as fit, at least one. `max_steps`: the stage ends there even if epochs are
        left; 0: it does not. At least one step is trained."""
        self._lengths = lengths
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)
        self._total = max(1, math.ceil(epochs * len(lengths)))
        self._starts: Sequence[int] = range(0, self._total, batch_size)
        if batch_tokens:
            self._starts = list(self._within(batch_tokens))
        self.steps = min(len(self._starts), max_steps) if max_steps else len(self._starts)
        """The number of steps of the stage."""

    def batch(self, step: int) -> list[int]:
        """Returns the indices of the records of a step, from 0. The last step of all may have fewer."""
        end = self._starts[step + 1] if step + 1 < len(self._starts) else self._total
        return [self._at(position) for position in range(self._starts[step], end)]

    def _within(self, batch_tokens: int) -> Iterator[int]:
        """Yields the position at which each step of at most so many tokens begins."""
        tokens = batch_tokens
        for position in range(self._total):
            length = self._lengths[self._at(position)]
            tokens += length
            if tokens > batch_tokens:
                yield position
                tokens = length

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._lengths))
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._lengths)))
        random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
        return order
