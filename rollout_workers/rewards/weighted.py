"""The sum that training optimizes: several rewards, each with a weight and a name."""

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

from headway.broker.schema import Prompt

from .base import Reward, RewardError, Score


class WeightedReward(NamedTuple):
    """One term of the sum."""

    name: str
    weight: float
    reward: Reward
    mean: float = 0.0
    std: float = 1.0
    clip: float = 0.0
    """0: no clipping."""

    def share(self, total: float) -> float:
        """Return the term's share of the sum: its score normalized, clipped and weighed."""
        normal = (total - self.mean) / self.std
        return self.weight * (max(-self.clip, min(self.clip, normal)) if self.clip else normal)


class WeightedSum:
    """A reward made of rewards, which run side by side."""

    def __init__(self, terms: Sequence[WeightedReward]) -> None:
        self._terms = tuple(terms)

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Return the weighted sum. `components` has each term's own score by name, as its reward gave it, and its parts
        as `name/part`."""
        scores = await asyncio.gather(*(t.reward.score(prompt, response, finish_reason, tokens) for t in self._terms))
        components: dict[str, float] = {}
        for term, score in zip(self._terms, scores, strict=True):
            components[term.name] = score.total
            components |= {f"{term.name}/{part}": value for part, value in score.components.items()}
        total = sum(term.share(score.total) for term, score in zip(self._terms, scores, strict=True))
        if not math.isfinite(total):
            raise RewardError(f"the rewards {components}, each times its weight, add up to {total}: lower the weights.")
        return Score(total=total, components=components)

    async def close(self) -> None:
        """Close every term."""
        for term in self._terms:
            await term.reward.close()
