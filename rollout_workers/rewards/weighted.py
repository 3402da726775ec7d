"""The sum that training optimizes: several scorers, each with a weight and a name."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from broker.schema import Prompt

from .base import Score, Scorer


class WeightedScorer(NamedTuple):
    """One term of the sum."""

    name: str
    weight: float
    scorer: Scorer


class WeightedSum:
    """A scorer made of scorers, which run side by side."""

    def __init__(self, terms: Sequence[WeightedScorer]) -> None:
        self._terms = tuple(terms)

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """Return the weighted sum. `components` has each term's own score by name, and its parts as `name/part`."""
        scores = await asyncio.gather(*(t.scorer.score(prompt, response, finish_reason) for t in self._terms))
        components: dict[str, float] = {}
        for term, score in zip(self._terms, scores, strict=True):
            components[term.name] = score.total
            components |= {f"{term.name}/{part}": value for part, value in score.components.items()}
        return Score(
            total=sum(t.weight * s.total for t, s in zip(self._terms, scores, strict=True)),
            components=components,
        )

    async def close(self) -> None:
        """Close every term."""
        for term in self._terms:
            await term.scorer.close()
