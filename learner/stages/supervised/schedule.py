"""The records and the learning rate of each step, from its number alone: a resumed stage needs to know nothing else."""

import math
import random
from functools import lru_cache
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


class Order:
    """The order in which a stage trains its records: every epoch holds each of them once, in an order of its own."""

    def __init__(self, records: int, *, batch_size: int, epochs: float, max_steps: int, seed: int) -> None:
        """`max_steps`: the stage ends there even if epochs are left; 0: it does not. At least one step is trained."""
        self._records = records
        self._batch_size = batch_size
        self._seed = seed
        self._total = max(1, math.ceil(epochs * records))
        steps = math.ceil(self._total / batch_size)
        self.steps = min(steps, max_steps) if max_steps else steps
        """The number of steps of the stage."""
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """Returns the indices of the records of a step, from 0. The last step of all may have fewer."""
        end = min((step + 1) * self._batch_size, self._total)
        return [self._at(position) for position in range(step * self._batch_size, end)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self._records)
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._records))
        random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
        return order


def learning_rate(step: int, steps: int, *, peak: float, warmup_steps: int, shape: Shape) -> float:
    """Returns the rate of a step, from 0: it rises linearly to `peak` over `warmup_steps`, since fresh Adam moments
    make the first steps too large, and then stays, or falls towards 0 behind the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    match shape:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
