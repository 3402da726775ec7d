"""One rank of several, run by torchrun: gathered shards of all kinds equal the tensors from which they were cut.

python -m torch.distributed.run --nproc-per-node N -m tests.learner.whole_rank
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headway.learner.backends.fsdp.sharding import whole

SHAPES = [(1,), (2,), (3, 5), (4,), (5, 3), (7, 2, 3), (9, 1), (10, 0), (0, 4), (128, 4, 2)]
"""Shapes: some have fewer rows than there are ranks, most leave the last rank fewer than the first, two are empty."""
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


def given() -> list[torch.Tensor]:
    """Return whole tensors, the same on every rank."""
    tensors = []
    for number, shape in enumerate(SHAPES):
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 100 * number
        tensors += [(values / 7 if kind.is_floating_point else values).to(kind) for kind in KINDS]
    return tensors


def sharded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shard a tensor as FSDP does."""
    module = nn.ParameterList(nn.Parameter(tensor.clone(), requires_grad=False) for tensor in tensors)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [parameter.detach() for parameter in module]


def check(tensors: list[torch.Tensor], shards: list[torch.Tensor], dtype: torch.dtype) -> None:
    for tensor, got in zip(tensors, whole(shards, dtype), strict=True):
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def main() -> None:
    dist.init_process_group("gloo")
    tensors, buffers = given(), [torch.tensor(0.7), torch.tensor(3)]
    shards = sharded(tensors)
    assert all(isinstance(shard, DTensor) for shard in shards)
    empty = [number for number, tensor in enumerate(tensors) if not tensor.numel()]
    for dtype in (torch.float32, torch.bfloat16):
        check([*tensors, *buffers], [*shards, *buffers], dtype)
        check([tensors[number] for number in empty], [shards[number] for number in empty], dtype)
        check([], [], dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
