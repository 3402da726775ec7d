"""Chains of calculations whose number of terms is long-tailed, and so are the responses: each term is a line of work.

    prompts.kind=benchmarks.peers.long_tailed:LongTailedPrompts      prompts.path=chain_sum or arithmetic
    sft.phases[].kind=benchmarks.peers.long_tailed:worked_examples   the same, with its work written down

In SmolLM2's tokens half of chain_sum's worked solutions have up to 38, one in 20 more than 308, one in 100 more than
635, and the longest of 5,000 has 832; the mean is 84.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import Item, PromptSource

MEDIAN_TERMS, SIGMA = 4, 1.2
"""The lognormal distribution: e to the sigma is the step from the median to the 84th percentile."""
FEWEST_TERMS, MOST_TERMS = 2, 60


class LongTailedPrompts:
    """The task's own prompts; each place draws the number of terms of its prompt."""

    def __init__(self, *, path: str, seed: int, most_terms: int = MOST_TERMS) -> None:
        self._seed = seed
        self._most_terms = most_terms

        @cache
        def of_terms(terms: int) -> PromptSource:
            kind, options = task(path, terms)
            return open_source(PromptsConfig(kind=kind, path=path, options=options), seed)

        self._of_terms = of_terms

    @property
    def size(self) -> None:
        return None

    def train(self, epoch: int, position: int) -> Item:
        rng = random.Random(f"terms:{self._seed}:{epoch}:{position}")
        return self._of_terms(draw_terms(rng, self._most_terms)).train(epoch, position)

    def held_out(self, count: int) -> list[Item]:
        rng = random.Random("terms:held-out")
        drawn = [draw_terms(rng, self._most_terms) for _ in range(count)]
        items = {terms: iter(self._of_terms(terms).held_out(number)) for terms, number in Counter(drawn).items()}
        return [next(items[terms]) for terms in drawn]


def worked_examples(*, path: str, seed: int, most_terms: int = MOST_TERMS, **careless: float) -> Iterator[Example]:
    """Yield worked examples of the same distribution, without end; `careless` is their error_rate and skip_rate."""

    @cache
    def of_terms(terms: int) -> Iterator[Example]:
        kind, options = task(path, terms)
        options = {"task_options": options} if kind == "reasoning_gym" else options
        return open_examples(SftPhaseConfig(kind=kind, path=path, options={**options, **careless}), seed)

    rng = random.Random(f"terms:{seed}")
    while True:
        yield next(of_terms(draw_terms(rng, most_terms)))


def draw_terms(rng: random.Random, most: int) -> int:
    """Draw the number of terms of a chain."""
    drawn = round(rng.lognormvariate(math.log(MEDIAN_TERMS), SIGMA))
    return min(max(drawn, FEWEST_TERMS), most)


def task(path: str, terms: int) -> tuple[str, dict[str, Any]]:
    """Return the kind of source that has the task, and the task's options for so many terms."""
    if path == "arithmetic":
        return "arithmetic", {"min_operations": terms - 1, "max_operations": terms - 1}
    return "reasoning_gym", {"min_terms": terms, "max_terms": terms, "min_digits": 1, "max_digits": 2}
