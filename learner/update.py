"""One batch into one weight version: advantages, packing, proximal logprobs, loss, optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch

from broker.schema import Group

from .backends.base import Backend
from .batch import PackedBatch
from .config import LearnerConfig, OptimizerConfig
from .objective import Objective, RewardStats, group_advantages
from .packing import PackableSequence, from_trajectory, pack
from .ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A batch with its advantages, the same on every rank."""

    sequences: tuple[PackableSequence, ...]
    rewards: RewardStats


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one batch did to the weights."""

    loss: float
    """Mean over the batch's optimizer updates."""
    grad_norm: float
    """Largest of the updates, before clipping; not finite if one was skipped."""
    learning_rate: float
    micro_batches: int
    """Of this rank."""
    algorithm: dict[str, float]


class Updater:
    """Turns batches into optimizer updates. Collective over the ranks. `reference` is needed for a KL penalty alone."""

    def __init__(
        self,
        backend: Backend,
        ranks: Ranks,
        objective: Objective,
        reference: Backend | None,
        *,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        temperature: float,
        max_lag: int,
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._objective = objective
        self._reference = reference
        self._learner = learner
        self._optimizer = optimizer
        self._temperature = temperature
        self._max_lag = max_lag

    def judge(self, groups: Sequence[Group], step: int) -> Judged:
        """Advantages within each group; tokens over the staleness bound become context."""
        advantages, rewards = group_advantages(groups, self._objective.advantage)
        sequences = tuple(
            from_trajectory(
                trajectory,
                advantages=advantage,
                step=step,
                max_lag=self._max_lag,
            )
            for trajectory, advantage in zip(
                (t for group in groups for t in group.trajectories), advantages, strict=True
            )
        )
        return Judged(sequences=sequences, rewards=rewards)

    def update(self, sequences: Sequence[PackableSequence], step: int) -> Update:
        """`updates_per_step` optimizer updates; proximal logprobs are those before the first."""
        parts = [self._pack(part) for part in split(sequences, self._learner.updates_per_step)]
        proximal = [self._proximal(part) for part in parts]
        learning_rate = self.learning_rate(step)
        losses, norms, reports = [], [], []
        for part, proximal_logprobs in zip(parts, proximal, strict=True):
            token_loss = self._objective.token_loss(
                part, self._ranks.sum, proximal_logprobs, self._reference_logprobs(part)
            )
            loss, grad_norm, report = self._backend.step(part, token_loss, self._temperature, learning_rate)
            losses.append(loss)
            norms.append(grad_norm)
            reports += report
        # A rank without sequences has nothing to report, and must still take part in the sums.
        names = self._ranks.share_bytes(msgspec.msgpack.encode(sorted({name for report in reports for name in report})))
        reports.append(dict.fromkeys(msgspec.msgpack.decode(names, type=list[str]), 0.0))
        return Update(
            loss=sum(losses) / len(losses),
            grad_norm=next((norm for norm in norms if not math.isfinite(norm)), max(norms)),
            learning_rate=learning_rate,
            micro_batches=sum(len(part) for part in parts),
            algorithm=self._objective.combine_reports(reports, self._ranks.sum, self._ranks.max),
        )

    def learning_rate(self, step: int) -> float:
        """A linear rise, then constant."""
        rise = self._optimizer.warmup_steps
        return self._optimizer.learning_rate * (min(1.0, (step + 1) / rise) if rise else 1.0)

    def _pack(self, sequences: Sequence[PackableSequence]) -> list[PackedBatch]:
        return pack(sequences, self._ranks.rank, self._ranks.world_size, self._learner.micro_batch_tokens)

    def _proximal(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor] | None:
        return self._backend.logprobs(batches, self._temperature) if self._objective.needs_proximal else None

    def _reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor] | None:
        return None if self._reference is None else self._reference.logprobs(batches, self._temperature)


def split(sequences: Sequence[PackableSequence], parts: int) -> list[Sequence[PackableSequence]]:
    """Nearly equal runs in order, none empty: groups stay together as far as the numbers allow."""
    parts = min(parts, len(sequences))
    bounds = [len(sequences) * part // parts for part in range(parts + 1)]
    return [sequences[start:end] for start, end in pairwise(bounds)]
