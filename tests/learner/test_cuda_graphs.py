"""Passes that are recorded for one row and replayed for others of its shape: on a CPU the replay is another call, and
written-out attention stands in for the kernel, so that all but the recording itself is what a GPU does."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import learner.models.attention
from learner.backends import open_backend
from learner.backends.fsdp import sharded_model
from learner.backends.fsdp.backend import FsdpBackend
from learner.backends.fsdp.policy import Policy
from learner.backends.fsdp.replayed_rows import ReplayedRows
from learner.backends.fsdp.rounded import RoundedWeights
from learner.config import ComputeConfig
from learner.models.model import load_model
from learner.rows.batch import PackedBatch
from learner.rows.packing import concatenate
from learner.rows.padding import PaddedShape
from tests.learner.test_prefix_trees import one_by_one, sharing
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

NEVER, AUTO = ComputeConfig(cuda_graphs="never"), ComputeConfig(cuda_graphs="auto")
Dtype = Any


class Repeated:
    """A recorder that makes the recorded call again. It never runs out of memory, unless a test says so."""

    room = True

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        return call

    def has_room(self) -> bool:
        return self.room


class Unrecordable(Repeated):
    """A recorder on which nothing can be recorded."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


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


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """Let a model on a CPU be recorded, whatever its dtype."""
    made = Repeated()
    monkeypatch.setattr(learner.models.attention, "varlen_attn", kernel)
    monkeypatch.setattr(sharded_model, "open_recorder", lambda _: made)
    monkeypatch.setattr(
        sharded_model, "why_launched", lambda compute, **_: "never" if compute.cuda_graphs == "never" else ""
    )
    return made


def opened(compute: ComputeConfig, dtype: Dtype = "float32", seed: int = 1) -> FsdpBackend:
    backend = open_backend("fsdp", model_config("qwen3", dtype=dtype), OPTIMIZER, seed=seed, compute=compute)
    assert isinstance(backend, FsdpBackend)
    return backend


def rows(seed: int) -> list[PackedBatch]:
    """Return a row that shares tokens and two that do not; with another seed they have the same padded shapes."""
    given = [*sharing(4, prompt=6, agreed=3, seed=seed), *sequences([5, 1, 7], seed)]
    wide = dataclasses.replace(concatenate(sequences([9, 4], seed)), wants_confidence=True)
    return [concatenate(given, is_tree=True), concatenate(sequences([8, 20, 2], seed)), wide]


def trained(backend: FsdpBackend, steps: int = 4) -> list[torch.Tensor]:
    """Return losses, norms, logprobs and weights of a few updates, each over new rows of the same shapes."""
    found: list[torch.Tensor] = []
    for seed in range(steps):
        batches = rows(seed)
        found += backend.logprobs(batches, 0.8)
        loss, norm, reports = backend.step(batches[:2], ratio_loss(batches, 30.0), 0.8, 1e-3)
        found += [torch.tensor(loss), torch.tensor(norm), torch.tensor(reports[0]["tokens"])]
    return found + [tensor.float() for _, tensor in backend.named_tensors()]


def test_rows_of_a_shape_differ_in_contents_alone(recorder: Repeated) -> None:
    policy = opened(AUTO)._policy
    assert isinstance(policy, Policy)
    for one, other in zip(rows(0), rows(1), strict=True):
        shape = PaddedShape.of(one)
        assert shape == PaddedShape.of(other)
        first, second = (policy.padded_row(batch, shape) for batch in (one, other))
        assert [tensor.shape for tensor in first.tensors] == [tensor.shape for tensor in second.tensors]
        assert first.layout.max_seqlen == second.layout.max_seqlen
        assert not torch.equal(first.token_ids_N, second.token_ids_N)


def test_replayed_rows_train_as_launched_ones(recorder: Repeated) -> None:
    launched, replayed = opened(NEVER), opened(AUTO)
    assert launched._replayed is None
    assert replayed._replayed is not None
    expected, found = trained(launched), trained(replayed)
    assert replayed._replayed.num_recorded == 5, "three shapes without a gradient, two with one"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_replayed_gradients_are_those_of_the_plain_row(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.models.attention, "varlen_attn", kernel)
    model: Any = load_model(model_config(architecture), 1)
    policy = Policy(model.double(), on_cpu=True, half_precision=False)
    weights = RoundedWeights(policy, torch.float64)
    replayed = ReplayedRows(policy, weights, Repeated())
    for seed in range(3):
        weights.begin()
        for number, batch in enumerate(rows(seed)):
            wanted = policy(batch, 0.7)
            pull = torch.linspace(-1, 2, wanted.numel(), dtype=wanted.dtype).view_as(wanted) * (1 + number)
            (wanted * pull).sum().backward()
            with weights.in_place():
                found = replayed(batch, 0.7)
                (found * pull).sum().backward()
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        expected = [parameter.grad for parameter in policy.parameters()]
        weights.give()
        for parameter, gradient in zip(policy.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
        policy.zero_grad()
    assert replayed.num_recorded == 3


def test_rounded_weights_are_those_of_fsdp_to_the_bit(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are launched differ by nothing: neither in the passes nor in the sums over micro-batches."""
    sharded, rounded = opened(NEVER, "bfloat16"), opened(AUTO, "bfloat16")
    assert rounded._replayed is not None
    rounded._replayed.stop("a test")
    for one, other in zip(trained(sharded), trained(rounded), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_is_replayed_as_it_is_launched(recorder: Repeated) -> None:
    """Padding takes part in no sum but as zeros, and the kernel's stand-in has one order of them."""
    launched, replayed = opened(NEVER, "bfloat16"), opened(AUTO, "bfloat16")
    for one, other in zip(trained(launched), trained(replayed), strict=True):
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)
