"""Updaters and critics of tiny models."""

from typing import Any

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.config import LearnerConfig, ModelConfig, OptimizerConfig
from headway.learner.objective.critic import Critic
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import UpdateConfig, Updater
from headway.learner.ranks import Ranks

from .tiny import OPTIMIZER


def open_updater(
    algorithm: AlgorithmConfig,
    backend: Backend,
    reference: Any = None,
    critic: Critic | None = None,
    *,
    objective: Objective | None = None,
    learner: dict[str, Any] | None = None,
    **others: Any,
) -> Updater:
    """Return an updater of the backend. `learner` and `others` lie over the usual settings."""
    usual: dict[str, Any] = {"optimizer": OPTIMIZER, "temperature": 1.0, "max_new_tokens": 32, "max_lag": 2}
    usual["learner"] = LearnerConfig(**({"micro_batch_tokens": 40} | (learner or {})))
    config = UpdateConfig(algorithm=algorithm, **(usual | others))
    return Updater(backend, Ranks.of(backend), objective or Objective(algorithm), reference, critic, config=config)


def open_critic(
    model: ModelConfig, *, kind: str = "fsdp", seed: int = 3, optimizer: OptimizerConfig = OPTIMIZER
) -> Critic:
    values = open_backend(kind, model, optimizer, seed=seed, head="value")
    return Critic(values, Ranks.of(values), clip=0.2, gamma=1.0, lam=0.95, learning_rate=1e-3)
