"""The model's double: 64 numbers, real gradients, a step in a twentieth of a second, a checkpoint of one small file."""

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from headway.learner.backends.base import Backend, Snapshot, TokenLoss
from headway.learner.backends.snapshots import save
from headway.learner.batching.batch import PackedBatch
from headway.learner.checkpoint import read_checkpoint
from headway.learner.config import ModelConfig, OptimizerConfig

from .trail import Beginning, Trail

SIZE = 64
_FILE, _AUTHOR = "model.safetensors", "author"


def token_logprobs(weights: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return logprobs that depend on the token and the weights alone."""
    return torch.log_softmax(weights, 0)[token_ids % SIZE]


class TinyBackend:
    """A backend in which the same batches in the same order give the same weights, bit for bit."""

    rank = replica = 0
    world_size = replicas = 1
    is_lead = True

    trails: ClassVar[Path]
    """The directory of the trails of this process's trial."""
    step_s: ClassVar[float]
    """The seconds of each step."""
    weights_name: ClassVar[str]
    """The name of the weights of this process's run."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **settings: object) -> None:
        self._weights = torch.linspace(-1.0, 1.0, SIZE)
        self._beginning = Beginning()
        self._author = uuid.uuid4().hex
        """The author's random name. Incarnations are not unique: a server that loses its last second repeats one."""

    @cached_property
    def trail(self) -> Trail:
        """Return the trail of this learner."""
        return Trail(self.trails, self._author, self._beginning)

    @property
    def digest(self) -> str:
        """Return the name of the weights as they are."""
        return hashlib.blake2b(self._weights.numpy().tobytes(), digest_size=8).hexdigest()

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        return [_logprobs(self._weights, batch) for batch in batches]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        time.sleep(self.step_s)
        weights = self._weights.clone().requires_grad_()
        total, reports = torch.zeros(()), []
        for index, batch in enumerate(batches):
            share, report = loss(index, _logprobs(weights, batch))
            total = total + share
            reports.append(report)
        (gradient,) = torch.autograd.grad(total, weights)
        self._weights -= learning_rate * gradient
        # Different batches always make different weights, even where the advantages cancel out.
        self._weights[sum(int(batch.token_ids_T.sum()) for batch in batches) % SIZE] += 1e-3
        return float(total.detach()), float(gradient.norm()), reports

    def follow(self, policy: Backend, decay: float) -> None:
        """Do nothing, because no trial has a reference."""
        raise NotImplementedError

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.weights_name, self._weights

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        weights = {self.weights_name: self._weights.clone()}
        author = self.trail.author
        return Snapshot(
            (lambda: save_file(weights, directory / _FILE), lambda: (directory / _AUTHOR).write_text(author))
        )

    def save(self, directory: Path) -> None:
        save(self, directory)

    def off_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, directory: Path) -> None:
        self._weights = load_file(directory / _FILE)[self.weights_name]
        self._beginning = Beginning(author_of(directory), read_checkpoint(directory).state.step)


def author_of(checkpoint: Path) -> str:
    """Return the learner that saved the checkpoint."""
    return (checkpoint / _AUTHOR).read_text()


def _logprobs(weights: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return logprobs [T]."""
    return torch.where(batch.position_ids_T == 0, 0.0, token_logprobs(weights, batch.token_ids_T))
