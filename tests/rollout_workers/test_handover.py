"""Tensors are given to an engine's processes without a copy where these can attach the tensors' memory."""

import torch

from headway.rollout_workers.engines.weight_loading.named_tensors import one_by_one
from headway.rollout_workers.engines.weight_loading.shared_tensors import Handover, TensorMapper
from headway.weightsync.deliveries import attachable_buckets

EXPERTS = "layers.0.experts"


def tensors_in(*buckets: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A matrix and fused experts, filled with their places."""
    first, second = (bucket.view(torch.float32) for bucket in buckets)
    experts = second[8 : 8 + 2 * 4 * 3].view(2, 4, 3)
    matrix = first[:6].view(2, 3)
    matrix.copy_(torch.arange(6.0).view(2, 3))
    experts.copy_(torch.arange(24.0).view(2, 4, 3))
    return [("matrix", matrix), (f"{EXPERTS}.gate_up_proj", experts)]


def test_tensors_in_attachable_memory_are_not_copied() -> None:
    tensors = tensors_in(*attachable_buckets([1024, 2048]))
    with Handover(lambda given: list(one_by_one(given))).of(tensors) as given:
        mapped = TensorMapper().tensors(given.shared)
        assert list(mapped) == ["matrix", *(f"{EXPERTS}.{n}.{p}_proj.weight" for n in range(2) for p in ("gate", "up"))]
        assert torch.equal(mapped[f"{EXPERTS}.1.up_proj.weight"], torch.arange(18.0, 24.0).view(2, 3))
        tensors[0][1].fill_(-1.0)
        assert torch.equal(mapped["matrix"], torch.full((2, 3), -1.0))


def test_all_tensors_are_copied_if_one_lies_elsewhere_or_has_gaps() -> None:
    there = tensors_in(*attachable_buckets([1024, 2048]))
    elsewhere = [*there, ("other", torch.ones(2))]
    gaps = [*there, ("columns", there[0][1][:, ::2])]
    for tensors in (elsewhere, gaps):
        expected = {name: tensor.clone() for name, tensor in tensors}
        with Handover(lambda given: given).of(tensors) as given:
            mapped = TensorMapper().tensors(given.shared)
            there[0][1].zero_()
            assert all(torch.equal(mapped[name], tensor) for name, tensor in expected.items())
        there[0][1].copy_(expected["matrix"])
