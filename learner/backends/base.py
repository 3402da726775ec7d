"""The seam between the learner's loop and the backends, which hold, run and shard a policy or a critic."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from headway.learner.batching.batch import PackedBatch

TokenLoss = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, float]]]
"""(index of the micro-batch, current_logprobs_T) -> (the micro-batch's share of the batch's loss, metrics to report).

A critic's loss gets values_T in the place of logprobs; both lie on the device of the micro-batch. Shares are divided by
the denominator of the whole batch over all ranks. The backend sums them over micro-batches and ranks, so that packing
does not change the loss.
"""


@dataclass(frozen=True)
class Snapshot:
    """The state of one model, ready to be written."""

    writes: tuple[Callable[[], object], ...]
    """Functions that write this rank's files into a directory that exists. The caller calls each of them, even if
    another one fails. If the state was copied they touch files alone; else they read the live state and are
    collective."""
    complete: Callable[[], None] = lambda: None
    """Writes the files that describe those of all ranks. Collective."""


class CheckpointPart(Protocol):
    """A part of a checkpoint."""

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Return a snapshot to write into `directory`; if `is_copied`, of the state as it is now. Collective."""
        ...

    def load(self, directory: Path) -> None:
        """Restore the state of the snapshot, bit for bit. Collective."""
        ...


class TrainableModel(Protocol):
    """A sharded model with its optimizer. All calls, its subclasses' too, are collective over the learner's ranks.

    The ranks that hold one replica of the model together get the same batches and return the same results.
    """

    rank: int
    world_size: int
    replica: int
    """The index of the replica that this rank is part of."""
    replicas: int
    """The number of replicas that share a step's batches."""
    is_lead: bool
    """True on one rank of each replica, rank 0 among them: sums over replicas count that rank."""

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Return a snapshot of parameters and optimizer to write into `directory`, which need not exist yet.

        If `is_copied`, they are copied into CPU memory, and training may go on before they are written.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write parameters and optimizer at once (`learner.backends.snapshots.save`); durable when it returns."""
        ...

    def load(self, directory: Path) -> None:
        """Restore the saved state, bit for bit."""
        ...

    def off_device(self) -> AbstractContextManager[None]:
        """Keep parameters and optimizer in host memory while the context is open; the model must not be used meanwhile.
        Afterwards they are the same, bit for bit. Not collective."""
        ...


class Backend(TrainableModel, Protocol):
    """The policy. A Hugging Face model and the process's RNG state are saved with it.

    If a batch has `experts_TLK`, these experts compute its tokens. The first report of a step then counts the choices
    that the model's own routers would not have made (`router_disagreement_sum`), and all (`router_disagreement_count`).
    """

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs of every token under the current weights, without gradient; 0 for first tokens."""
        ...

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """Make one update over `batches`; return (loss summed over replicas, gradient norm, this replica's reports)."""
        ...

    def follow(self, policy: "Backend", decay: float) -> None:
        """Set each parameter to `decay` * own + (1 - `decay`) * the policy's. Both have the same kind and model."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full parameters by Hugging Face name on every rank, gathered one at a time."""
        ...


@runtime_checkable
class AdapterBackend(Backend, Protocol):
    """A policy of which an adapter may be trained alone (`model.adapter`)."""

    @property
    def trains_adapter(self) -> bool:
        """Whether one is. The next members are for that case."""
        ...

    @property
    def adapter_scale(self) -> float:
        """The factor of B A."""
        ...

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen weights as `named_tensors` does, without the adapter."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which passes compute what the frozen weights alone do. Update nothing within it."""
        ...

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B on every rank by the model's names for them, as engines take them (`AdaptedEngine`)."""
        ...

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them by their names, and in their form, in PEFT's files."""
        ...


class TopTokens(NamedTuple):
    """The C likeliest tokens in the place of each of T tokens, the likeliest first."""

    token_ids_TC: torch.Tensor
    """[T, C] int64"""
    logprobs_TC: torch.Tensor
    """[T, C] fp32; 0 for the first token of a sequence."""

    @classmethod
    def of(cls, found_TC2: torch.Tensor) -> "TopTokens":
        """Returns them out of [T, C, 2] tokens and logprobs; an empty micro-batch has neither."""
        if not len(found_TC2):
            return cls(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0))
        return cls(found_TC2[..., 0].long(), found_TC2[..., 1])


@runtime_checkable
class Teacher(Backend, Protocol):
    """A policy that tells what it finds likeliest, and whose logprobs may be asked of candidates
    (`PackedBatch.candidates_TC`): both a teacher and its student in distillation are one."""

    def likeliest(self, batches: Sequence[PackedBatch], count: int) -> list[TopTokens]:
        """Return, for every micro-batch, the `count` likeliest tokens in each place, at temperature 1; the whole
        vocabulary if that is smaller."""
        ...


class ValueBackend(TrainableModel, Protocol):
    """A critic: a model with a head of one output. It starts from a reward model, or else its head is 0."""

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[T] fp32 values, without gradient: V(s_t) of the state in which token t is chosen, computed from the tokens
        before t; 0 for first tokens."""
        ...

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        """Make one update over `batches`; return (loss summed over replicas, gradient norm, this replica's reports)."""
        ...


class ScoreBackend(ValueBackend, Protocol):
    """A reward model. Its head has no bias, and is random at first unless the model was a reward model before.

    A score is the value of the state behind the last token. A sequence classifier for transformers is saved with it.
    """

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full parameters by their names in the classifier's files on every rank, gathered one at a time."""
        ...
