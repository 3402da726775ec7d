"""A policy that one GPU holds whole, and whose kernels are launched: all that its updates may differ by. On a CPU the
same tests hold with written-out attention, but for memory of the device."""

from typing import Any

import pytest
import torch

import headway.learner.models.attention
from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.config import ComputeConfig
from tests.learner import test_picked_positions
from tests.learner.recording import kernel, opened, rows, trained
from tests.learner.tiny import ratio_loss

on_gpu = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses what torch deprecates
        pytest.mark.filterwarnings("ignore::UserWarning"),  # and advises on products in float32
    ],
)
DEVICES: list[Any] = ["cpu", on_gpu]


def whole(monkeypatch: pytest.MonkeyPatch, device: str, **compute: Any) -> FsdpBackend:
    """Return a policy in bfloat16 that is not sharded."""
    if device == "cpu":
        monkeypatch.setattr(fsdp_backend, "stays_whole", lambda *_: True)
    backend = opened(ComputeConfig(**{"cuda_graphs": "never", **compute}), "bfloat16", device=device)
    assert backend._rounded is not None
    return backend


def sharded(monkeypatch: pytest.MonkeyPatch, device: str, **compute: Any) -> FsdpBackend:
    """Return the same policy within FSDP's hooks."""
    with monkeypatch.context() as patch:
        patch.setattr(fsdp_backend, "stays_whole", lambda *_: False)
        backend = opened(ComputeConfig(cuda_graphs="never", **compute), "bfloat16", device=device)
    assert backend._rounded is None
    return backend


@pytest.mark.parametrize("device", [on_gpu])  # test_rounded_weights.py shows it on CPUs
@pytest.mark.parametrize("compute", [{}, {"offload_optimizer": True}, {"recompute": "full"}])
def test_it_trains_as_a_sharded_one_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, device: str, compute: dict[str, Any]
) -> None:
    found = [trained(kind(monkeypatch, device, **compute), steps=2) for kind in (sharded, whole)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_its_prompts_skip_the_output_head(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A product over fewer rows is another kernel on a GPU, which may round logits otherwise."""
    backends = [whole(monkeypatch, device) for _ in range(2)]
    for seed in range(3):
        found = []
        for only_trained, backend in zip((False, True), backends, strict=True):
            batches = test_picked_positions.rows(only_trained=only_trained, seed=seed)
            logprobs = [
                found_T * batch.loss_mask_T
                for batch, found_T in zip(batches, backend.logprobs(batches, 0.8), strict=True)
            ]
            loss, norm, _ = backend.step(batches, ratio_loss(batches, 30.0), 0.8, 1e-3)
            found.append([*logprobs, torch.tensor([loss, norm])])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, rtol=0.02, atol=0.03)
        assert found[0][-1][1] > 0.01
    assert any(batch.picked is not None and len(batch.picked) < batch.num_positions for batch in batches)


@pytest.mark.parametrize("device", [on_gpu])
def test_its_compiled_layers_train_as_launched_ones(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Compiled kernels round less often."""
    launched = whole(monkeypatch, device)
    compiled = whole(monkeypatch, device, compile=True)
    for seed in range(3):
        batches = rows(seed)[:2]
        found = []
        for backend in (launched, compiled):
            logprobs = backend.logprobs(batches, 0.8)
            loss, norm, _ = backend.step(batches, ratio_loss(batches, 30.0), 0.8, 1e-3)
            found.append([*logprobs, torch.tensor([loss, norm])])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, rtol=0.05, atol=0.06)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compute", [{}, {"offload_optimizer": True}])
def test_it_leaves_its_device_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, device: str, compute: dict[str, Any]
) -> None:
    stays, leaves = (whole(monkeypatch, device, **compute) for _ in range(2))
    expected = trained(stays, steps=2) + trained(stays, steps=1, first=2)
    found = trained(leaves, steps=2)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    masters = sum(4 * parameter.numel() for parameter in leaves._parameters)
    with leaves.off_device():
        assert {parameter.untyped_storage().nbytes() for parameter in leaves._parameters} == {0}
        if device == "cuda":
            assert before - torch.cuda.memory_allocated() >= masters
    found += trained(leaves, steps=1, first=2)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", [on_gpu])
def test_graphs_end_when_it_leaves_its_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its rows are launched from then on, and differ from a replay's by the shapes of padded rows alone."""
    stays, leaves = (opened(ComputeConfig(), "bfloat16", device=device) for _ in range(2))
    assert leaves._replayed is not None
    for backend in (stays, leaves):
        trained(backend, steps=3)
    assert leaves._replayed.num_recorded >= 5
    with leaves.off_device():
        torch.cuda.empty_cache()
        poison = torch.full((1 << 24,), torch.nan, device=device)  # what a graph would read where weights were
    del poison
    assert leaves._replayed.num_recorded == 0
    batches = rows(3)
    for one, other in zip(stays.logprobs(batches, 0.8), leaves.logprobs(batches, 0.8), strict=True):
        torch.testing.assert_close(other, one, rtol=0.02, atol=0.03)


@pytest.fixture(autouse=True)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the variable-length kernel on a CPU."""
    if request.node.callspec.params["device"] == "cpu":
        monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
