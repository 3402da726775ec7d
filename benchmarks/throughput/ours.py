"""A backend in training, as the learner drives it."""

from collections.abc import Sequence

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.batching.packing import PackableSequence, pack
from headway.learner.config import ModelConfig, OptimizerConfig
from headway.learner.objective.objective import Objective
from headway.learner.ranks import Ranks

from .case import LEARNING_RATE, Case


class BackendTraining:
    """A `TrainingStep` (see `case`) through `open_backend`."""

    def __init__(
        self, case: Case, model: ModelConfig, optimizer: OptimizerConfig, given: Sequence[PackableSequence]
    ) -> None:
        self._backend = open_backend(
            case.name, model, optimizer, device=case.device, layout=case.layout, compute=case.compute
        )
        self.rank = self._backend.rank
        self._ranks = Ranks.of(self._backend)
        self._objective = Objective(AlgorithmConfig(), is_one_update=True)
        self._batches = pack(given, self._ranks.replica, self._ranks.replicas, case.micro_batch_tokens)
        self.facts = {"micro_batches": len(self._batches), "replicas": self._ranks.replicas}

    def step(self) -> tuple[float, float]:
        """Take one update. Collective."""
        loss = self._objective.token_loss(self._batches, self._ranks.sum)
        total, grad_norm, _ = self._backend.step(self._batches, loss, 1.0, LEARNING_RATE)
        return total, grad_norm
