"""Asks a teacher for its logprobs of the tokens of a finished sample, by way of its scorers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.broker.schema import Prompt
from headway.broker.security.sample_validation import LOGPROB_ROUNDING
from headway.rollout_workers.rewards.base import CallFailures
from headway.rollout_workers.scorers import ScoringError, TokenScorer, unpack_candidates

from .recorder import Recorder

TEACHER = "teacher"
"""The name of the scorer that workers ask."""


class TeacherLogprobs(NamedTuple):
    """The fields of a trajectory that a teacher fills; 0 in the places of an environment's tokens."""

    teacher_logprobs: NDArray[np.float32]
    """[R]"""
    candidate_tokens: NDArray[np.int32] | None
    """[R, K]; None if the teacher is asked for no candidates."""
    candidate_logprobs: NDArray[np.float32] | None
    """[R, K]"""


class TeacherClient:
    """Asks the teacher, by way of its scorers."""

    def __init__(self, scorer: TokenScorer, *, temperature: float, deadline_s: float, top_k: int = 0) -> None:
        """`temperature`: that at which the workers sample. `top_k`: the candidates that it names in each place."""
        self._scorer = scorer
        self._temperature = temperature
        self._top_k = top_k
        self._failures = CallFailures(
            "the teacher", "Look into the logs of its scorers.", deadline_s, failure="was asked in vain"
        )

    async def logprobs(self, prompt: Prompt, recorder: Recorder) -> TeacherLogprobs:
        """Return the natural logarithms of the probabilities that the teacher gives the sampled tokens of a finished
        sample, and its candidates in their places, at the sampling temperature.

        Raises UnscoredError where no scorer could tell them, and RewardError if that happens again and again.
        """
        try:
            found = await self._scorer.score(prompt.token_ids, recorder.tokens, self._temperature, self._top_k)
            logprobs, tokens, candidates = unpack_candidates(found, len(recorder.tokens), self._top_k)
            highest = max(float(logprobs.max()), float(candidates.max(initial=-np.inf)))
            if highest > LOGPROB_ROUNDING:
                raise ScoringError(f"it answers with logprobs of up to {highest:g}")
        except ScoringError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        mask = np.asarray(recorder.loss_mask, bool)
        if not self._top_k:
            return TeacherLogprobs(_where(mask, logprobs), None, None)
        return TeacherLogprobs(
            _where(mask, logprobs),
            np.where(mask[:, None], tokens, 0).astype(np.int32),
            _where(mask[:, None], candidates),
        )

    async def close(self) -> None:
        """Forget what was asked."""
        await self._scorer.close()


def _where(mask: NDArray[np.bool_], logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(mask, logprobs, np.float32(0)).astype(np.float32)
