"""A teacher's candidates in the answer to a request: R response tokens, K candidates in the place of each."""

import numpy as np
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.wire.checks import MAX_TOKEN_ID

from .base import ScoringError


def joined(logprobs_R: NDArray[np.float32], tokens_RK: NDArray[np.int64], candidates_RK: NDArray[np.float32]) -> Scores:
    """Return the answer: of each token its own logprob, its candidates and their logprobs."""
    return np.concatenate([logprobs_R[:, None], tokens_RK, candidates_RK], axis=1).astype(np.float32).reshape(-1)


def parted(
    scores: Scores, length: int, top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return what `joined` was given for `length` tokens with `top_k` candidates each. Raises ScoringError for an
    answer of another size or of impossible tokens."""
    if scores.size != length * (1 + 2 * top_k):
        raise ScoringError(f"it answers with {scores.size} numbers for {length} tokens with {top_k} candidates each")
    rows = scores.reshape(length, 1 + 2 * top_k)
    tokens = rows[:, 1 : 1 + top_k]
    if not ((tokens >= 0) & (tokens <= MAX_TOKEN_ID) & (tokens == np.floor(tokens))).all():
        raise ScoringError("it names a candidate that is no token")
    return rows[:, 0], tokens.astype(np.int32), rows[:, 1 + top_k :]
