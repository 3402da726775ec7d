"""The logprobs that a teacher gives the tokens of a finished sample."""

import numpy as np
from numpy.typing import NDArray

from broker.possible import LOGPROB_ROUNDING
from broker.schema import Prompt
from rollout_workers.rewards.failures import Failures
from rollout_workers.scorers.base import ScoringError, TokenScorer

from .recorder import Recorder

TEACHER = "teacher"
"""The name of the scorer that workers ask."""


class AskedTeacher:
    """The teacher as a worker asks it."""

    def __init__(self, scorer: TokenScorer, *, temperature: float, deadline_s: float) -> None:
        """`temperature`: that at which the workers sample."""
        self._scorer = scorer
        self._temperature = temperature
        self._failures = Failures(
            "the teacher", "Look into the logs of its scorers.", deadline_s, tried="was asked in vain"
        )

    async def logprobs(self, prompt: Prompt, recorder: Recorder) -> NDArray[np.float32]:
        """Return [R] float32: the natural logarithm of the probability that the teacher gives each sampled token of a
        finished sample, at the sampling temperature; 0 for an environment's tokens.

        Raises UnscoredError where no scorer could tell them, and RewardError if that happens again and again.
        """
        try:
            found = await self._scorer.score(prompt.token_ids, recorder.tokens, self._temperature)
            if len(found) != len(recorder.tokens) or found.max() > LOGPROB_ROUNDING:
                raise ScoringError(f"it answers with {len(found)} logprobs of up to {found.max():g}")
        except ScoringError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        return np.where(np.asarray(recorder.loss_mask, bool), found, np.float32(0)).astype(np.float32)

    async def close(self) -> None:
        """Forget what was asked."""
        await self._scorer.close()
