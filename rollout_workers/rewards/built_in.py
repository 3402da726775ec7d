"""The rewards of a few lines: the arithmetic chain, a reward model's score, none, and the weighted sum of several.

The arithmetic chain `^4*5*8+7=` is answered by worked steps, then `#7`. A reward model is asked through scorers, the
processes that hold it. Runs that only generate have no reward, as nothing is trained on their responses. Training
optimizes the weighted sum, whose terms have a weight and a name each.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.broker.schema import Prompt
from headway.rollout_workers.scorers import ScoringError, TokenScorer

from .base import CallFailures, Reward, RewardError, Score


class ArithmeticReward:
    """Scores 1 if the response ended by itself and its text after the last `#` is exactly the ground truth, else 0."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. One that the length limit cut off is wrong, even if the answer stands at its end. Raises
        RewardError for a ground truth that is neither text nor a whole number."""
        if complaint := _complaint(prompt.ground_truth):
            raise RewardError(f"prompt {prompt.group!r} ({prompt.text[:80]!r}): {complaint}")
        _, mark, answer = response.rpartition("#")
        is_right = finish_reason == "stop" and mark == "#" and answer == str(prompt.ground_truth)
        return Score(total=float(is_right))

    async def complaints(self, prompts: Sequence[Prompt]) -> list[str]:
        """See GroundTruthReader."""
        return [_complaint(prompt.ground_truth) for prompt in prompts]

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _complaint(truth: Any) -> str:
    is_readable = isinstance(truth, str | int) and not isinstance(truth, bool)
    return "" if is_readable else f"the ground truth {truth!r:.200} is a {type(truth).__name__}, and no text"


class ModelReward:
    """Asks a reward model for the score of prompt and response, token for token as the policy sampled them."""

    def __init__(self, name: str, scorer: TokenScorer, deadline_s: float) -> None:
        """`name`: that of the reward in metrics."""
        self._scorer = scorer
        self._failures = CallFailures(
            f"reward {name}", "Look into the logs of its scorers.", deadline_s, failure="was asked in vain"
        )

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Return the score, read at the last of `tokens`; the text is not looked at. Waits while no scorer is alive.

        Raises UnscoredError where several scorers could not answer, RewardError if that happens again and again.
        """
        assert len(tokens), "a reward model reads tokens"
        try:
            found = await self._scorer.score(prompt.token_ids, tokens)
            if len(found) != 1:
                raise ScoringError(f"it answers with {len(found)} scores for a response")
        except ScoringError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        return Score(total=float(found[0]))

    async def close(self) -> None:
        """Forget what was asked."""
        await self._scorer.close()


class ZeroReward:
    """Gives every response 0."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """See Reward."""
        return Score(total=0.0)

    async def close(self) -> None:
        """See Reward."""


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
