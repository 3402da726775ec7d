"""The seams of scorers: what a worker asks, and what runs a model in a scorer's process."""

from collections.abc import Sequence
from typing import Protocol

from broker.client.scoring import Scores
from broker.errors import LASTING_EXIT, HeadwayError
from broker.schema import ScoreRequest


class ScoringError(HeadwayError):
    """No scorer could score these tokens; other tokens may be scored."""


class UnfitModelError(HeadwayError):
    """A scorer's model is missing, of the wrong kind, or has another vocabulary than the policy."""

    exit_code = LASTING_EXIT


class TokenScorer(Protocol):
    """A scorer as a worker sees it."""

    async def score(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float = 1.0, top_k: int = 0
    ) -> Scores:
        """Return the scores of a response of R tokens: [1] of a reward model, [R] of a teacher, [R * (1 + 2K)] of one
        that is asked for K = `top_k` candidates (`candidates.parted` reads these); finite.

        Many callers may wait at once. It waits for as long as no scorer is alive; cancelling it forgets the request.
        Raises ScoringError where several scorers could not answer.
        """
        ...

    async def close(self) -> None:
        """Forget what was asked. Idempotent."""
        ...


class Runner(Protocol):
    """A model that scores token sequences, loaded in this process."""

    vocabulary: int
    """The number of token ids that it knows."""
    longest: int
    """The most tokens of prompt and response together."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each request, which do not depend on the others but for rounding. Blocks; one thread
        calls it at a time."""
        ...
