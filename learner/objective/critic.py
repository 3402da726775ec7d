"""PPO's critic: values of the states that a batch went through, its token advantages, and the critic's own update.

    V = values(batches)                                                  before the first update of either model
    returns, advantages, metrics = returns_and_advantages(batches, rewards, V)    ─► the policy's `advantages_T`
    update(part, returns, V)                                             once for each update of the policy

Lists have one [T] tensor for each micro-batch. All three calls are collective over the ranks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from headway.algorithms.returns import at_last_trained, clipped_value_loss, gae, whiten, whitening_sums
from headway.learner.backends.base import Snapshot, ValueBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.ranks import Ranks

from .loss import Objective

Sums = tuple[float, float, float]
"""`algorithms.returns.whitening_sums` of a whole batch."""


class Estimates(NamedTuple):
    """A critic's estimates for one batch."""

    returns: list[torch.Tensor]
    """The targets to which the critic's values are fitted."""
    advantages: list[torch.Tensor]
    """Whitened: mean 0 and variance 1 over the trained tokens of all micro-batches and ranks."""
    metrics: dict[str, float]


class Critic:
    """A value model that learns next to the policy."""

    def __init__(
        self, backend: ValueBackend, ranks: Ranks, *, clip: float, gamma: float, lam: float, learning_rate: float
    ) -> None:
        self.backend = backend
        """The value model."""
        self._ranks = ranks
        self._clip = clip
        self.gamma = gamma
        """The discount from one trained token to the next."""
        self._lam = lam
        self._learning_rate = learning_rate

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Returns V of the state in which each token is chosen, under the current weights."""
        return self.backend.values(batches)

    def returns_and_advantages(
        self, batches: Sequence[PackedBatch], rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Estimates:
        """Estimates advantages (GAE). `batches` must be the whole step's, since advantages are whitened together."""
        estimates = [
            gae(rewards_T, values_T, batch.loss_mask_T, batch.cu_seqlens, gamma=self.gamma, lam=self._lam)
            for batch, rewards_T, values_T in zip(batches, rewards, values, strict=True)
        ]
        masks, returns = [batch.loss_mask_T for batch in batches], [returns_T for _, returns_T in estimates]
        sums = self._whole([advantages_T for advantages_T, _ in estimates], masks)
        totals = [torch.tensor(each, dtype=torch.float64) for each in sums]
        whitened = [
            whiten(advantages_T, mask_T, *totals) for (advantages_T, _), mask_T in zip(estimates, masks, strict=True)
        ]
        return Estimates(returns, whitened, _report(sums, self._whole(returns, masks)))

    def update(
        self, batches: Sequence[PackedBatch], returns: Sequence[torch.Tensor], old_values: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Makes one optimizer update with the mean of the clipped loss over the trained tokens of `batches`."""
        (tokens,) = self._ranks.sum([sum(float(batch.loss_mask_T.sum()) for batch in batches)])

        def loss(index: int, values_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            mask_T = batches[index].loss_mask_T
            losses_T, metrics = clipped_value_loss(values_T, old_values[index], returns[index], mask_T, clip=self._clip)
            return (losses_T * mask_T).sum() / max(tokens, 1.0), {name: float(m) for name, m in metrics.items()}

        total, grad_norm, reports = self.backend.step(batches, loss, self._learning_rate)
        reports.append(_nothing())
        whole = Objective.combine_reports(reports, self._ranks.sum, self._ranks.max)
        return {**whole, "value_loss": total, "value_grad_norm": grad_norm}

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Returns the snapshot of the critic that a checkpoint holds."""
        return self.backend.snapshot(directory, is_copied=is_copied)

    def load(self, directory: Path) -> None:
        """Restores the state of the snapshot, bit for bit."""
        self.backend.load(directory)

    def _whole(self, values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> Sums:
        """Returns `whitening_sums` over all micro-batches and ranks."""
        parts = [whitening_sums(values_T, mask_T) for values_T, mask_T in zip(values, masks, strict=True)]
        total, square_total, count = self._ranks.sum([float(sum(column)) for column in zip(*parts, strict=True)])
        return total, square_total, count


def outcome_rewards(batch: PackedBatch) -> torch.Tensor:
    """[T] the reward of each sequence at its last trained token, 0 elsewhere; `advantages_T` holds the rewards here.
    Each row of a rollout ends with the rollout's: its tokens look ahead along their own row alone.

    The caller adds rewards of single tokens, such as a KL penalty.
    """
    return at_last_trained(batch.advantages_T, batch.loss_mask_T, batch.cu_seqlens)


def _report(advantage_sums: Sums, return_sums: Sums) -> dict[str, float]:
    """Returns explained_variance: 1 - Var(return - V) / Var(return); return - V is the advantage before whitening.

    It is 1 for a perfect critic, and 0 for one that predicts only the mean, or if all returns are equal.
    """
    (advantage, advantage_square, count), (return_, return_square, _) = advantage_sums, return_sums
    tokens = max(count, 1.0)
    unexplained = advantage_square / tokens - (advantage / tokens) ** 2
    variance = return_square / tokens - (return_ / tokens) ** 2
    rounding = 1e-12 * return_square / tokens
    return {
        "value_mean": (return_ - advantage) / tokens,
        "return_mean": return_ / tokens,
        "explained_variance": 1 - unexplained / variance if variance > rounding else 0.0,
    }


def _nothing() -> dict[str, float]:
    """Returns the report of an empty micro-batch, so that a rank without sequences reports all names, too."""
    empty = torch.zeros(0)
    return {name: float(value) for name, value in clipped_value_loss(empty, empty, empty, empty)[1].items()}
