"""A reward model in vLLM's pooling runner."""

from collections.abc import Sequence

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.scorers.runtimes.sequences import sequence

from .engine import BatchEngine


class VllmRewardModel:
    """Scores whole responses by the output of the head at the last token."""

    def __init__(self, engine: BatchEngine, vocabulary: int, longest: int) -> None:
        from vllm import PoolingParams

        self._engine = engine
        self.vocabulary = vocabulary
        self.longest = longest
        self._params = PoolingParams(task="classify", use_activation=False)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [1] float32 for each request."""
        params = [self._params.clone() for _ in requests]
        outputs = self._engine.answers([sequence(request) for request in requests], params)
        return [output.outputs.data.reshape(1).float().cpu().numpy() for output in outputs]
