"""The learner's ranks: their process group, the sharding of the model over them, sums over them."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .policy import PackedModel, ValueModel


def join_ranks(device: str) -> DeviceMesh:
    """The mesh of all ranks: those that torchrun started, or this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        _init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    return init_device_mesh(device, (dist.get_world_size(),))


def _init_process_group(backend: str) -> None:
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def shard(module: PackedModel, mesh: DeviceMesh, *, half_precision: bool) -> None:
    """Shard every decoder layer, then what remains. Gradients are reduced in fp32; a value head is never rounded."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half_precision else None, reduce_dtype=torch.float32)
    blocks = set(module.model._no_split_modules or ())
    for part in list(module.modules()):
        if type(part).__name__ in blocks:
            fully_shard(part, mesh=mesh, mp_policy=precision)
    if isinstance(module, ValueModel):
        fully_shard(module.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(module, mesh=mesh, mp_policy=precision)


def sync_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks or only accumulates them."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(now)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All shards. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over_ranks(value: float, device: torch.device) -> float:
    """Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item()


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, device: torch.device) -> float:
    """Scale gradients to a global norm of at most `max_norm`; the norm before. Collective.

    On shards, not on DTensors: their dispatch would cost more than the arithmetic of a small model.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().item() if gradients else 0.0
    norm: float = sum_over_ranks(squares, device) ** 0.5
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_(gradients, scale)
    return norm
