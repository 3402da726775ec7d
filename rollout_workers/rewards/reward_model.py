"""The score that a reward model gives a response, asked of processes that hold the model."""

from collections.abc import Sequence

from headway.broker.schema import Prompt
from headway.rollout_workers.scorers.base import ScoringError, TokenScorer

from .base import Score
from .failures import Failures


class AskedReward:
    """Asks a reward model for the score of prompt and response, token for token as the policy sampled them."""

    def __init__(self, name: str, scorer: TokenScorer, deadline_s: float) -> None:
        """`name`: that of the reward in metrics."""
        self._scorer = scorer
        self._failures = Failures(
            f"reward {name}", "Look into the logs of its scorers.", deadline_s, tried="was asked in vain"
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
