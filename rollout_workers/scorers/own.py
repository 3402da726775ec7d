"""A scorer in the caller's own process, for commands that have no broker."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest

from .base import Runner


class OwnScorer:
    """Scores with a model that this process holds, one request at a time, in a thread."""

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        """`open_runner` loads the model when the first request comes: a stage that opens an evaluation may measure
        nothing, and the model may not be there yet."""
        self._open_runner = open_runner
        self._runner: Runner | None = None
        self._alone = asyncio.Lock()

    async def score(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float = 1.0, top_k: int = 0
    ) -> Scores:
        """Return the scores of a response."""
        request = ScoreRequest(
            prompt_tokens=np.asarray(prompt_tokens, np.int32),
            response_tokens=np.asarray(response_tokens, np.int32),
            temperature=temperature,
            top_k=top_k,
        )
        async with self._alone:
            if self._runner is None:
                self._runner = await asyncio.to_thread(self._open_runner)
            (scores,) = await asyncio.to_thread(self._runner.score, [request])
        return scores

    async def close(self) -> None:
        """Do nothing: the model goes with the process."""
