"""Checks that tensors are an adapter of a model before an engine changes anything, and what it holds of them after it.

R rank, I input features, O output features, E experts.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import nn

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.base import NamedTensors
from headway.rollout_workers.engines.held import Held
from headway.weightsync.tensors.fingerprint import fingerprint_part

FACTOR_NAME = re.compile(r"(?P<module>.+)\.(?P<weight>gate_up_proj_|down_proj_|)lora_(?P<factor>[AB])")
"""The name of A or B: the module that holds the weight, the weight's name if it is that of experts, the factor."""


def check_adapter(modules: Mapping[str, nn.Module], tensors: NamedTensors) -> None:
    """Raise WeightSyncError unless `tensors` are whole changes of weights of these modules: A [R, I] and B [O, R] of
    each, with E before these for experts."""
    given = {name: tensor.shape for name, tensor in tensors}
    for name, shape in given.items():
        match = FACTOR_NAME.fullmatch(name)
        module = modules.get(match["module"]) if match else None
        if match is None or module is None:
            raise WeightSyncError(f"the engine's model has no place for {name} of an adapter")
        weight: torch.Tensor | None = getattr(module, match["weight"].rstrip("_") or "weight", None)
        first, second = (given.get(f"{name[:-1]}{factor}") for factor in "AB")
        if weight is None or first is None or second is None:
            raise WeightSyncError(f"{name} is half of an adapter, or has no weight to change")
        *outer, rows, columns = weight.shape
        rank = second[-1]
        if (tuple(first), tuple(second)) != ((*outer, rank, columns), (*outer, rows, rank)):
            raise WeightSyncError(
                f"{name} has shape {list(shape)}, which fits no change of a weight of shape {list(weight.shape)}"
            )


def wanted_adapter(modules: Mapping[str, nn.Module], tensors: NamedTensors) -> NamedTensors:
    """Return the tensors of an adapter. Raises WeightSyncError unless they are one of a model with these modules."""
    check_adapter(modules, tensors)
    return tensors


def decoder_linears(shapes: nn.Module) -> list[str]:
    """Return the last names of the decoder's linear layers, which adapters may change; the head is not among them. Of a
    model with experts they are those of attention: with another one SGLang would compute all experts by its kernels for
    adapters."""
    modules = dict(shapes.named_modules())
    within = ".self_attn." if any(hasattr(module, "has_gate") for module in modules.values()) else ".layers."
    linears = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linears if within in f".{name}"})


def held_adapter(
    tensors: Mapping[str, torch.Tensor],
    read: Callable[[str, torch.Size], tuple[torch.Tensor, torch.Tensor] | None],
) -> Held | None:
    """Return what an engine's process holds of these factors; None if it holds one in another number format.

    `read` returns the part of its memory that holds one of this name and shape, and which part of the factor that is: a
    view without memory, which has its place and its steps. It returns None for a factor that the process has not.
    """
    found = {}
    for name, tensor in tensors.items():
        located = read(name, tensor.shape)
        if located is None:
            found[name] = 0, 0
            continue
        part, shard = located
        if part.dtype != tensor.dtype:
            return None
        fingerprint = fingerprint_part(part.contiguous(), int(shard.storage_offset()), *shard.stride())
        found[name] = fingerprint, part.numel()
    return Held.of(found)
