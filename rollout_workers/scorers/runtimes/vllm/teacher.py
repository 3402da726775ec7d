"""A teacher in vLLM, which tells the logprobs of a prompt's tokens: prompt and response are one prompt to it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.scorers.candidates import joined
from headway.rollout_workers.scorers.runtimes.sequences import sequence

from .engine import BatchEngine


class VllmTeacher:
    """Scores response tokens by vLLM's prompt logprobs, which are those at temperature 1."""

    def __init__(self, engine: BatchEngine, vocabulary: int, longest: int, shared: int) -> None:
        """`shared`: the number of the first token ids that may be candidates."""
        self._engine = engine
        self.vocabulary = vocabulary
        self.longest = longest
        self._shared = shared

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [R] float32 for each request: natural logarithms; with candidates as
        `rollout_workers.scorers.candidates` joins them. Raises ValueError for another temperature than 1."""
        for request in requests:
            _check(request)
        answers = self._answers(requests, surplus=0)
        short = [number for number, answer in enumerate(answers) if answer is None]
        again = self._answers([requests[number] for number in short], surplus=self.vocabulary - self._shared)
        for number, answer in zip(short, again, strict=True):
            answers[number] = answer
        assert all(answer is not None for answer in answers)
        return [answer for answer in answers if answer is not None]

    def _answers(self, requests: Sequence[ScoreRequest], surplus: int) -> list[Scores | None]:
        """Ask for so many more candidates of each token than wanted. An answer is None where too few of them are the
        policy's tokens."""
        params = [self._params(request.top_k + surplus) for request in requests]
        outputs = self._engine.answers([sequence(request) for request in requests], params)
        return [self._answer(*one) for one in zip(requests, outputs, strict=True)]

    def _answer(self, request: ScoreRequest, output: Any) -> Scores | None:
        """N numbers in a row: those of the token itself, and of its candidates, the likeliest first."""
        length = len(request.prompt_tokens) + len(request.response_tokens) - 1
        flat = output.prompt_logprobs
        tokens_RN = np.array(flat.token_ids, np.int64).reshape(length, -1)[-len(request.response_tokens) :]
        logprobs_RN = np.array(flat.logprobs, np.float32).reshape(length, -1)[-len(request.response_tokens) :]
        logprobs_RN = np.minimum(logprobs_RN, 0)
        is_strange_RN = tokens_RN[:, 1:] >= self._shared
        if ((~is_strange_RN).sum(1) < request.top_k).any():
            return None
        best_RK = np.argsort(is_strange_RN, axis=1, kind="stable")[:, : request.top_k]
        best_tokens_RK = np.take_along_axis(tokens_RN[:, 1:], best_RK, 1)
        return joined(logprobs_RN[:, 0], best_tokens_RK, _taken(logprobs_RN[:, 1:], best_RK))

    def _params(self, candidates: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=min(candidates, self.vocabulary),
            flat_logprobs=True,
            detokenize=False,
        )


def _taken(logprobs_RN: NDArray[np.float32], best_RK: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.take_along_axis(logprobs_RN, best_RK, 1)


def _check(request: ScoreRequest) -> None:
    if not len(request.prompt_tokens):  # nothing comes before the first token, which thus has no probability
        raise ValueError("a response without a prompt")
    if request.temperature != 1:
        raise ValueError(
            f"vLLM tells a teacher's logprobs at temperature 1 alone, and the request's is {request.temperature:g}; set"
            " sampling.temperature=1, or scorers.engine.kind=transformers"
        )
