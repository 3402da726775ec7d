"""The batch of every comparison: float64, packed for Headway, padded to a rectangle for the peers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.learner.batching.batch import PackedBatch

LENGTHS = (5, 1, 12, 3, 7, 9, 4, 12)
GROUPS = (0, 0, 0, 1, 1, 1, 1, 1)
"""No group has a single sample, whose advantage is 0 for Headway and its reward for verl."""


class Outcome(NamedTuple):
    """The results of one side."""

    value: torch.Tensor
    gradient_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """S responses of up to L tokens, T in all."""

    cu_seqlens: torch.Tensor
    mask_T: torch.Tensor
    current_T: torch.Tensor
    proximal_T: torch.Tensor
    behavior_T: torch.Tensor
    reference_T: torch.Tensor
    advantages_S: torch.Tensor
    rewards_S: torch.Tensor
    rewards_T: torch.Tensor
    values_T: torch.Tensor

    @property
    def group(self) -> torch.Tensor:
        """Return [S], the number of each sample's group."""
        return torch.tensor(GROUPS)

    @property
    def is_desirable(self) -> torch.Tensor:
        """Return [S], a judgement of each response by itself."""
        return torch.tensor([True, False, False, True, True, True, False, True])

    @property
    def margins(self) -> torch.Tensor:
        """Return [P], the margins by which the chosen responses should win, for a reward model."""
        return self.advantages_S[0::2].abs()

    @property
    def longest(self) -> int:
        return max(LENGTHS)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return [T], each response's value at its tokens."""
        return values_S.repeat_interleave(torch.tensor(LENGTHS))

    def padded(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S, L], 0 beyond each response; differentiable."""
        rectangle = values_T.new_zeros(len(LENGTHS) * self.longest)
        return rectangle.index_copy(0, self._places(), values_T).view(len(LENGTHS), self.longest)

    def packed(self, values_SL: torch.Tensor) -> torch.Tensor:
        """Return [T] from a rectangle."""
        return values_SL.reshape(-1)[self._places()]

    def batch(self) -> PackedBatch:
        """Return the batch as the learner has it."""
        zeros_T = torch.zeros(sum(LENGTHS), dtype=torch.int64)
        return PackedBatch(
            token_ids_T=zeros_T,
            position_ids_T=zeros_T,
            cu_seqlens=self.cu_seqlens,
            loss_mask_T=self.mask_T,
            behavior_logprobs_T=self.behavior_T,
            advantages_T=self.spread(self.advantages_S),
            lags_T=zeros_T,
        )

    def _places(self) -> torch.Tensor:
        return torch.cat([torch.arange(n) + s * self.longest for s, n in enumerate(LENGTHS)])


def draw(seed: int = 0) -> Sample:
    """Draw a sample: half of the ratios lie outside of PPO's clip, and one place in four is masked."""
    generator = torch.Generator().manual_seed(seed)
    total, count = sum(LENGTHS), len(LENGTHS)
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0)
    mask_T = (torch.rand(total, generator=generator) < 0.75).double()
    mask_T[bounds[:-1]] = 1.0  # no two of them treat a response without a trained token alike
    behavior_T = -2 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.05

    def numbers(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Sample(
        cu_seqlens=bounds,
        mask_T=mask_T,
        proximal_T=behavior_T + 0.3 * numbers(total),
        current_T=behavior_T + 0.4 * numbers(total),
        reference_T=behavior_T + 0.3 * numbers(total),
        behavior_T=behavior_T,
        advantages_S=numbers(count),
        rewards_S=numbers(count),
        rewards_T=numbers(total),
        values_T=numbers(total),
    )
