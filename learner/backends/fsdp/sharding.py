"""A model's shards over all ranks: their gathering, the sending of gradients, and clipping."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from headway.learner.config import LayoutConfig
from headway.learner.ranks import sum_over_ranks

from .policy import PackedModel, ValueModel
from .row import ContextGroup

GATHERED_GRADIENT_BYTES = 24 << 30
"""Up to this size, in fp32, each rank sums the whole model's gradients until the last micro-batch, and sends them once.
A sixth of an H200's memory; more would take from the activations of models that need several GPUs."""

GATHERED_WEIGHT_BYTES = 24 << 30
"""Up to this size, in the forward pass's dtype, the whole model is gathered and rounded once a step, in the place of
twice a micro-batch. A sixth of an H200's memory again."""


def join_context(layout: LayoutConfig, device: str) -> ContextGroup:
    """Return the `layout.context` consecutive ranks that hold one replica with this one. Collective."""
    if layout.context == 1:
        return ContextGroup()
    replicas = dist.get_world_size() // layout.context
    mesh = init_device_mesh(device, (replicas, layout.context), mesh_dim_names=("replica", "context"))
    return ContextGroup(mesh.get_group("context"))


def shard(module: PackedModel, mesh: DeviceMesh, *, half_precision: bool) -> None:
    """Shard every decoder layer, then what remains. Gradients are reduced in fp32; a value head is never rounded.

    Run the model within `gathering`, which frees the gathered layers. The next layer is gathered while one computes:
    no operation of a layer waits for the device, so the process runs ahead of it. Explicit prefetching would only hold
    one more gathered layer.
    """
    if not needs_shards(mesh, half_precision=half_precision):
        return
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half_precision else None, reduce_dtype=torch.float32)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    if isinstance(module, ValueModel):
        fully_shard(module.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    root = fully_shard(module, mesh=mesh, mp_policy=precision)
    register_fsdp_forward_method(module, "whole_hidden")
    keeps = (2 if half_precision else 4) * _size(module) <= GATHERED_WEIGHT_BYTES
    root.set_reshard_after_forward(not keeps)
    root.set_reshard_after_backward(not keeps)


def needs_shards(mesh: DeviceMesh, *, half_precision: bool) -> bool:
    """Return False for a single CPU in fp32, which computes with its parameters as they are: there is nothing to
    gather, to round or to send, and FSDP's hooks would take a fifth of a small model's step."""
    return mesh.size() > 1 or mesh.device_type != "cpu" or half_precision


def stays_whole(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Return whether a policy is rounded as a whole by `RoundedWeights`, on a single GPU with room for that. FSDP would
    copy all weights and gradients of an update twice more, as if it sent them: 3 % of an update of Qwen3-1.7B over
    65,536 tokens on an H200."""
    has_room = 2 * _size(module) <= GATHERED_WEIGHT_BYTES
    return mesh.size() == 1 and mesh.device_type == "cuda" and dtype is torch.bfloat16 and has_room


@contextmanager
def gathering(module: nn.Module) -> Iterator[None]:
    """A context around all passes of a call; it frees gathered layers at its end, before the shards change."""
    try:
        yield
    finally:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def sync_gradients(module: nn.Module, *, is_last: bool) -> None:
    """Let the next backward pass send gradients with the last micro-batch only, or always if they would not fit.

    A single rank waits for the last one whatever the size: its shards are the whole model. One that is not sharded
    adds gradients up by itself.
    """
    if not isinstance(module, FSDPModule):
        return
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    fits = dist.get_world_size() == 1 or 4 * trained <= GATHERED_GRADIENT_BYTES
    module.set_requires_gradient_sync(is_last or not fits)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return each tensor whole; floating-point ones are rounded to `dtype` first. Collective.

    They are sent together: the overhead of one DTensor at a time would exceed the transfer.
    """
    shards = [_rounded(local(tensor), dtype) for tensor in tensors]
    if dist.get_world_size() == 1:
        return shards
    sharded = [(index, tensor) for index, tensor in enumerate(tensors) if isinstance(tensor, DTensor)]
    for kind in dict.fromkeys(shards[index].dtype for index, _ in sharded):  # a set has another order on each rank
        alike = [(index, tensor) for index, tensor in sharded if shards[index].dtype == kind]
        gathered = _gathered([tensor for _, tensor in alike], [shards[index] for index, _ in alike])
        for (index, _), tensor in zip(alike, gathered, strict=True):
            shards[index] = tensor
    return shards


def _gathered(tensors: Sequence[DTensor], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather shards of one dtype in one collective, each padded to the rows of the first rank: FSDP cuts the first
    dimension as `torch.chunk` does."""
    mesh = tensors[0].device_mesh
    assert all((tensor.device_mesh, tensor.placements) == (mesh, (Shard(0),)) for tensor in tensors)
    ranks = mesh.size()
    rows = [-(-tensor.shape[0] // ranks) for tensor in tensors]
    sizes = [count * tensor.shape[1:].numel() for count, tensor in zip(rows, tensors, strict=True)]
    flat = torch.zeros(sum(sizes), dtype=shards[0].dtype, device=shards[0].device)
    places = [place[: shard.numel()] for place, shard in zip(torch.split(flat, sizes), shards, strict=True)]
    torch._foreach_copy_(places, [shard.flatten() for shard in shards])
    all_ranks = flat.new_empty(ranks * flat.numel())
    # As bytes: gloo does not know every dtype.
    dist.all_gather_into_tensor(all_ranks.view(torch.uint8), flat.view(torch.uint8), group=mesh.get_group())
    parts = torch.split(all_ranks.view(ranks, flat.numel()), sizes, dim=1)
    return [
        part.reshape(ranks * count, *tensor.shape[1:])[: tensor.shape[0]]
        for part, count, tensor in zip(parts, rows, tensors, strict=True)
    ]


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, device: torch.device) -> float:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before. Collective.

    It computes on shards, not DTensors, whose dispatch would cost more than the arithmetic of a small model.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().item() if gradients else 0.0
    norm: float = sum_over_ranks(squares, device) ** 0.5
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_(gradients, scale)
    return norm


@torch.no_grad()
def copy_rows(weight: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy this rank's rows of a weight, in the shard's number format."""
    if not isinstance(shard, DTensor):
        shard.copy_(weight)
        return
    mesh = shard.device_mesh
    rows = weight.chunk(mesh.size())[mesh.get_local_rank() :][:1]  # the last ranks of a small weight have none
    for mine in rows:
        shard.to_local().copy_(mine)
