"""Scorers are models that score finished responses, in processes of their own: reward models and teachers.

    worker ── scorer_client.py ──ask──► broker ──lease──► serving.py ── runner (`runtimes.py`) in a process
              ▲                           │                    │
              └──────────collect──────────┴◄──────answer───────┘

A worker asks for many samples at once and goes on generating; each sample waits for its own scores. Any number of
processes answer for one scorer, which has a name: that of its reward, or `teacher`. They may start late, leave and be
killed. Both ends' seams stand here; `InProcessScorer` scores in the caller's process, where there is no broker.

The invariant: a model scores exactly the tokens that the policy sampled and read, with the policy's vocabulary. A
sample without scores is never trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.errors import LASTING_EXIT, HeadwayError
from headway.broker.schema import ScoreRequest
from headway.broker.wire.checks import MAX_TOKEN_ID

__all__ = ["ScoringError", "TokenScorer"]


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
        that is asked for K = `top_k` candidates (`unpack_candidates` reads these); finite.

        Many callers may wait at once. It waits for as long as no scorer is alive; cancelling it forgets the request.
        Raises ScoringError where several scorers could not answer.
        """
        ...

    async def close(self) -> None:
        """Forget what was asked. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoringModel:
    """The model of a scorer, as a runtime is told to load it."""

    kind: str
    """`reward_model` or `teacher`."""
    path: str
    """Its directory, or a hub id."""
    key: str
    """The key of the path in the recipe, which errors name."""
    policy: Path | None = None
    """The directory of the configuration that says which tokens may be candidates; without one the teacher's all
    may."""
    most_tokens: int | None = None
    """The most tokens of prompt and response that it is asked for; None: all that its positions allow."""


class Runner(Protocol):
    """A model that scores token sequences, loaded in this process. A runtime opens it, which is called with a
    `ScoringModel` and a `ScorersConfig` and raises UnfitModelError for a model that it cannot load."""

    vocabulary: int
    """The number of token ids that it knows."""
    longest: int
    """The most tokens of prompt and response together."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each request, which do not depend on the others but for rounding. Blocks; one thread
        calls it at a time."""
        ...


def pack_candidates(
    logprobs_R: NDArray[np.float32], tokens_RK: NDArray[np.int64], candidates_RK: NDArray[np.float32]
) -> Scores:
    """Return the answer: of each token its own logprob, its candidates and their logprobs."""
    return np.concatenate([logprobs_R[:, None], tokens_RK, candidates_RK], axis=1).astype(np.float32).reshape(-1)


def unpack_candidates(
    scores: Scores, length: int, top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return what `pack_candidates` was given for `length` tokens with `top_k` candidates each. Raises ScoringError
    for an answer of another size or of impossible tokens."""
    if scores.size != length * (1 + 2 * top_k):
        raise ScoringError(f"it answers with {scores.size} numbers for {length} tokens with {top_k} candidates each")
    rows = scores.reshape(length, 1 + 2 * top_k)
    tokens = rows[:, 1 : 1 + top_k]
    if not ((tokens >= 0) & (tokens <= MAX_TOKEN_ID) & (tokens == np.floor(tokens))).all():
        raise ScoringError("it names a candidate that is no token")
    return rows[:, 0], tokens.astype(np.int32), rows[:, 1 + top_k :]


def tokens_of(request: ScoreRequest) -> NDArray[np.int32]:
    """Return [P + R] tokens."""
    return np.concatenate([request.prompt_tokens, request.response_tokens])
