"""A model that leaves its device for a while frees the memory meanwhile, and is bit for bit the same afterwards.

`fsdp_rank.py` and `megatron_rank.py` prove it for several ranks, and for Megatron.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from headway.learner.backends import offload, open_backend
from headway.learner.backends.base import Backend, TrainableModel
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.offload import HostOffload
from headway.learner.batching.packing import pack
from headway.learner.config import ComputeConfig
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_bytes", [8, 52, 1 << 20])
def test_storages_come_back_whatever_views_there_are(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", chunk_bytes)
    whole, other, nothing = torch.randn(7, 3), torch.arange(5), torch.empty(0)
    view = whole[2:5]
    expected = [tensor.clone() for tensor in (whole, view, other)]
    place = HostOffload()
    for _ in range(2):
        with place.away([view, whole, whole.flatten(), other, nothing], CPU):
            assert [tensor.untyped_storage().nbytes() for tensor in (whole, view, other)] == [0, 0, 0]
        for tensor, wanted in zip((whole, view, other), expected, strict=True):
            assert torch.equal(tensor, wanted)
        whole[3] += 1  # in the view, too
        expected[0][3] += 1
        expected[1][1] += 1


def test_what_is_on_another_device_stays() -> None:
    here, elsewhere = torch.randn(3), torch.empty(3, device="meta")
    with HostOffload().away([here, elsewhere], CPU):
        assert (here.untyped_storage().nbytes(), elsewhere.untyped_storage().nbytes()) == (0, 12)


@contextmanager
def away(model: TrainableModel, times: int) -> Iterator[None]:
    for _ in range(times):
        with model.off_device():
            pass
    yield


def trained(backend: Backend, leaves: bool) -> list[torch.Tensor]:
    """Take two steps, between which the model may leave the device, and return its state and its logprobs."""
    batches = pack(sequences([7, 12, 5, 20]), 0, 1, 25)
    for _ in range(2):
        with away(backend, 2) if leaves else nullcontext():
            backend.step(batches, ratio_loss(batches, 20.0), 0.8, 1e-2)
    with away(backend, 1) if leaves else nullcontext():
        return [*(tensor.clone() for _, tensor in backend.named_tensors()), *backend.logprobs(batches, 1.0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_leaves_between_steps_ends_with_the_same_bits(dtype: Any) -> None:
    stays, leaves = (open_backend("fsdp", model_config("qwen3_moe", dtype=dtype), OPTIMIZER, seed=1) for _ in range(2))
    before = [tensor.clone() for _, tensor in stays.named_tensors()]
    expected, found = trained(stays, leaves=False), trained(leaves, leaves=True)
    assert not torch.equal(before[0], expected[0])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_moments_that_are_kept_off_the_device_leave_with_the_rest() -> None:
    compute = ComputeConfig(offload_optimizer=True)
    stays, leaves = (open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=1, compute=compute) for _ in range(2))
    for one, other in zip(trained(stays, leaves=False), trained(leaves, leaves=True), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_there_meanwhile() -> None:
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=1)
    trained(backend, leaves=False)
    assert isinstance(backend, FsdpBackend)
    held = list(backend._held())
    assert len(held) == 4 * len(backend._parameters)  # two moments and the number of steps
    with backend.off_device():
        assert {tensor.untyped_storage().nbytes() for tensor in held} == {0}
    tensors = [tensor for _, tensor in backend.named_tensors()]
    assert all(tensor.isfinite().all() for tensor in tensors)
