"""The seam between the learner's loop and whatever holds, runs and shards a model: the policy's, or a critic's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from learner.rows.batch import PackedBatch

TokenLoss = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, float]]]
"""(index of the micro-batch, current_logprobs_T) -> (its share of the batch's loss, what to report of it).

A critic's gets values_T in the place of logprobs; both lie on the device of the micro-batch.
Shares are divided by the denominator of the whole batch over all ranks, so they sum to the loss: micro-batches are
summed by the backend, ranks too, and how sequences were packed makes no difference.
"""


@dataclass(frozen=True)
class Snapshot:
    """One model, ready to be written."""

    writes: tuple[Callable[[], object], ...]
    """This rank's files, into a directory that exists. Each is called, whatever happens to the others. If the state was
    copied they touch files alone; else they read it as it is, collectively."""
    complete: Callable[[], None] = lambda: None
    """Collective: what takes knowledge of the files of all ranks."""


class Stored(Protocol):
    """What is part of a checkpoint."""

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Ready to be written into `directory`; the state as it is now, if it `is_copied`. Collective."""
        ...

    def load(self, directory: Path) -> None:
        """Restores the state of the snapshot, bit for bit. Collective."""
        ...


class Trained(Protocol):
    """A sharded model with its optimizer. All calls, of its kinds too, are collective over the learner's ranks.

    The ranks that hold one replica of the model together get the same batches and return the same results.
    """

    rank: int
    world_size: int
    replica: int
    """Which replica this rank is part of."""
    replicas: int
    """How many of them share a step's batches."""
    is_lead: bool
    """Whether this rank speaks for its replica where replicas are counted; one rank of each does, rank 0 among them."""

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Parameters and optimizer, ready to be written into `directory`, which need not exist yet.

        If `is_copied`, they are copied into CPU memory, and training may go on before they are written.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write all that at once (`learner.backends.saving.save`); durable when it returns."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what was written, bit for bit."""
        ...

    def off_device(self) -> AbstractContextManager[None]:
        """Its parameters and optimizer lie in host memory within, and it is not to be used; bit for bit the same
        afterwards. Not collective."""
        ...


class Backend(Trained, Protocol):
    """The policy. A Hugging Face model and the process's RNG state are saved with it.

    Where a batch has `experts_TLK`, these experts compute its tokens, and the first report of a step says as the pair
    `router_disagreement_sum` and `_count` how many of these choices the model's own routers would not have made.
    """

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs of every token under the weights as they are, without gradient; 0 for first tokens."""
        ...

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """One update over `batches`: (loss summed over replicas, gradient norm, reports of this replica's)."""
        ...

    def follow(self, policy: "Backend", decay: float) -> None:
        """Parameters become `decay` of themselves and the rest of the policy's, which has the same kind and model."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters by Hugging Face name, gathered one at a time; they are yielded on every rank."""
        ...


class ValueBackend(Trained, Protocol):
    """A critic: the policy's architecture with a head of one output, which is 0 before the first step."""

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[T] fp32 values, without gradient: V(s_t) of the state in which token t is chosen, so computed from the
        tokens before t; 0 for first tokens."""
        ...

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """One update over `batches`: (loss summed over replicas, gradient norm, reports of this replica's)."""
        ...
