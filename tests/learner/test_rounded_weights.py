"""Rounded copies of the weights, and sums of their gradients: they are those of FSDP, stay where graphs find them, and
take no memory beyond an update that no graph needs."""

from typing import Any

import pytest
import torch

from headway.learner.backends.fsdp import backend as fsdp_backend
from headway.learner.backends.fsdp.optimizer import RoundedWeights
from headway.learner.backends.fsdp.sharding import local
from headway.learner.config import ComputeConfig
from tests.learner.recording import ALWAYS, AUTO, NEVER, Repeated, opened, trained


@pytest.mark.parametrize("has_adapter", [False, True])
def test_rounded_weights_are_those_of_fsdp_to_the_bit(recorder: Repeated, has_adapter: bool) -> None:
    """Rows that are launched differ by nothing: neither in the passes nor in the sums over micro-batches."""
    sharded, rounded = (opened(compute, "bfloat16", has_adapter=has_adapter) for compute in (NEVER, ALWAYS))
    assert rounded._replayed is not None
    rounded._replayed.stop("a test")
    for one, other in zip(trained(sharded), trained(rounded), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compute"),
    [
        ({}, {}),
        ({"has_adapter": True}, {}),
        ({"architecture": "qwen3_moe"}, {}),
        ({}, {"recompute": "full"}),
        ({}, {"offload_optimizer": True}),
    ],
)
def test_a_model_of_a_single_gpu_is_rounded_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compute: dict[str, Any]
) -> None:
    """Its updates are those of FSDP to the bit, and copies and sums have no memory between two of them."""
    never = ComputeConfig(cuda_graphs="never", **compute)
    sharded = opened(never, "bfloat16", **options)
    monkeypatch.setattr(fsdp_backend, "stays_whole", lambda *_: True)
    whole = opened(never, "bfloat16", **options)
    assert whole._replayed is None
    assert whole._rounded is not None
    for one, other in zip(trained(sharded), trained(whole), strict=True):
        assert torch.equal(one, other)
    assert {copy.untyped_storage().nbytes() for copy in whole._rounded.copies} == {0}
    assert whole._rounded._sums == []
    with whole.off_device():
        assert {local(tensor).untyped_storage().nbytes() for tensor in whole._held()} == {0}
    for one, other in zip(trained(sharded), trained(whole), strict=True):
        assert torch.equal(one, other)


def test_an_update_that_fails_leaves_no_sums() -> None:
    """A learner that outlives it may give the device's memory to another program."""
    linear = torch.nn.Linear(3, 2)
    weights = RoundedWeights(linear, torch.bfloat16, stays=False)
    weights.begin()
    with weights.in_place():
        linear(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(total is not None for total in weights._sums)
    weights.release()
    assert weights._sums == []


def test_recorded_passes_find_weights_and_sums_where_they_were(recorder: Repeated) -> None:
    """A graph reads and writes by address."""
    backend = opened(AUTO, "bfloat16")
    trained(backend, steps=1)
    assert backend._rounded is not None
    held = [*backend._rounded.copies, *(total for total in backend._rounded._sums if total is not None)]
    places = [tensor.data_ptr() for tensor in held]
    assert len(places) == 2 * len(backend._parameters)
    trained(backend, steps=2)
    assert [tensor.data_ptr() for tensor in held] == places
    assert [one is other for one, other in zip(held, backend._rounded.copies, strict=False)] == [True] * (
        len(held) // 2
    )


def test_a_frozen_parameter_is_rounded_once() -> None:
    linear = torch.nn.Linear(3, 2)
    linear.bias.requires_grad_(False)
    weights = RoundedWeights(linear, torch.bfloat16)
    with weights.in_place():
        assert linear(torch.ones(1, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert (linear.weight.dtype, linear.bias.dtype) == (torch.float32, torch.bfloat16)


def test_the_base_of_an_adapter_is_neither_copied_nor_changed(recorder: Repeated) -> None:
    backend = opened(AUTO, "bfloat16", has_adapter=True)
    frozen = {name: p for name, p in backend._policy.named_parameters() if not p.requires_grad}
    before = {name: parameter.clone() for name, parameter in frozen.items()}
    trained(backend)
    assert backend._rounded is not None
    assert len(backend._rounded.copies) == len(backend._rounded._sums) == len(backend._parameters)
    for name, parameter in backend._policy.named_parameters():
        if name in before:
            assert parameter is frozen[name]
            assert torch.equal(parameter, before[name])
