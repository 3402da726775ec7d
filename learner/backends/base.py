"""The seam between the learner's loop and whatever holds, runs and shards the model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from learner.batch import PackedBatch

TokenLoss = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, float]]]
"""(index of the micro-batch, current_logprobs_T) -> (its share of the batch's loss, what to report of it).

Shares are divided by the denominator of the whole batch over all ranks, so they sum to the loss: micro-batches are
summed by the backend, ranks too, and how sequences were packed makes no difference.
"""


class Backend(Protocol):
    """A sharded model with its optimizer. All calls are collective over the learner's ranks."""

    rank: int
    world_size: int

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs of every token under the weights as they are, without gradient; 0 for first tokens."""
        ...

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """One optimizer update over `batches`: (loss summed over ranks, gradient norm, reports of this rank's)."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters by Hugging Face name, gathered one at a time; they are yielded on every rank."""
        ...

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model, the optimizer and the RNG state into `directory`; durable when it returns."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...
