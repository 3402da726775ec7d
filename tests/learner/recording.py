"""Policies on a CPU whose passes are recorded and replayed: a replay is another call there, and written-out attention
stands in for the kernel, so that all but the recording itself is what a GPU does."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.config import ComputeConfig
from tests.learner.adapted import with_adapter
from tests.learner.test_prefix_trees import one_by_one, sharing
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

NEVER, AUTO = ComputeConfig(cuda_graphs="never"), ComputeConfig(cuda_graphs="auto")
ALWAYS = ComputeConfig(cuda_graphs="always")
Dtype = Any


class Repeated:
    """A recorder that makes the recorded call again. It never runs out of memory, unless a test says so."""

    room = True

    def warm_up(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        return call

    def has_room(self) -> bool:
        return self.room


class _Poisoned(torch.autograd.Function):
    """Rows of which all but the first have a gradient of no meaning: the kernel leaves it as it finds it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, real: int) -> torch.Tensor:
        ctx.real = real
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        poisoned = gradients[0].clone()
        poisoned[ctx.real :] = torch.nan
        return poisoned, None


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: Any, cu_keys: Any, *_: int, **options: Any) -> Any:
    """Stand in for the variable-length kernel."""
    k, v = (_Poisoned.apply(rows, int(cu_keys[-1])) for rows in (k, v))
    return one_by_one(q, k, v, cu, cu_keys, options["scale"])


def opened(
    compute: ComputeConfig,
    dtype: Dtype = "float32",
    seed: int = 1,
    *,
    has_adapter: bool = False,
    architecture: str = "qwen3",
    device: str = "cpu",
) -> FsdpBackend:
    model = model_config(architecture, dtype=dtype)
    model = with_adapter(model) if has_adapter else model
    backend = open_backend("fsdp", model, OPTIMIZER, seed=seed, device=device, compute=compute)
    assert isinstance(backend, FsdpBackend)
    return backend


def rows(seed: int) -> list[PackedBatch]:
    """Return a row that shares tokens and two that do not; with another seed they have the same padded shapes."""
    given = [*sharing(4, prompt=6, agreed=3, seed=seed), *sequences([5, 1, 7], seed)]
    wide = dataclasses.replace(concatenate(sequences([9, 4], seed)), wants_confidence=True)
    return [concatenate(given, is_tree=True), concatenate(sequences([8, 20, 2], seed)), wide]


def trained(backend: FsdpBackend, steps: int = 4, first: int = 0, *, only_trained: bool = False) -> list[torch.Tensor]:
    """Return losses, norms, logprobs and weights of a few updates, each over new rows of the same shapes."""
    found: list[torch.Tensor] = []
    for seed in range(first, first + steps):
        batches = [dataclasses.replace(batch, only_trained=only_trained) for batch in rows(seed)]
        found += backend.logprobs(batches, 0.8)
        loss, norm, reports = backend.step(batches, ratio_loss(batches, 30.0), 0.8, 1e-3)
        found += [torch.tensor(loss), torch.tensor(norm), torch.tensor(reports[0]["tokens"])]
    return found + [tensor.float() for _, tensor in backend.named_tensors()]


def given(seed: int, is_tree: bool) -> list[PackableSequence]:
    """Return what a large row has several of: samples of one group, which share tokens, or one sample."""
    return sharing(4, prompt=20, agreed=3, seed=seed) if is_tree else sequences([20], seed)
