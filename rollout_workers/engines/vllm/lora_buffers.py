"""Adapters in one of vLLM's processes: a new one takes the place of another in vLLM's own LoRA buffers.

A request names a place, and goes on with the new adapter where the place's is replaced, as it does with whole weights.
vLLM keys its prefix cache by the name of a place, which never changes: the engine's salt, and the pause that clears the
cache, tell versions apart.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headway.broker.errors import HeadwayError
from headway.rollout_workers.engines.base import WeightFingerprints
from headway.rollout_workers.engines.weight_loading.engine_adapters import decoder_linears, held_adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks for which vLLM can be started."""

Tensors = Mapping[str, torch.Tensor]


def adapter_arguments(rank: int, places: int, shapes: nn.Module, dtype: object) -> dict[str, Any]:
    """Return what vLLM is started with, to hold so many adapters of this rank for the decoder's linear layers; nothing
    for rank 0.

    An adapter of the head, even an empty one, cannot be computed for the tokens of a prompt, which `score` wants.
    Raises HeadwayError for a number format of the model that vLLM's kernels for adapters do not take.
    """
    if not rank:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if dtype in ("float32", "float") and not current_platform.is_cpu():
        raise HeadwayError(
            "on GPUs vLLM computes adapters of models in bfloat16 and float16 alone: set engine.dtype=bfloat16, or"
            " weights.adapter=merged"
        )

    names = (
        {"lora_target_modules": decoder_linears(shapes)}
        if "lora_target_modules" in AsyncEngineArgs.__dataclass_fields__
        else {}
    )
    # vLLM's operations for CPUs index the slot of a request without an adapter by -1, where it computes beside others:
    # that is the last one, which stays empty.
    slots = places + 1 if current_platform.is_cpu() else places
    return {
        **names,
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": next(most for most in RANKS if most >= rank),
    }


def adapter_request(place: int) -> Any:
    """Return what requests name the adapter of a place by; None for 0. Nothing is at its path: the adapter is there
    before any request."""
    from vllm.lora.request import LoRARequest

    name = f"headway-{place}"
    return LoRARequest(name, place, name) if place else None


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Let the model have its own layers in the place of those that vLLM wraps around them for adapters. Loaders name
    the weights of a model that has no adapters, and those of vLLM 0.26 find none in a wrapped layer."""
    from vllm.lora.layers import BaseLayerWithLoRA

    children: list[tuple[dict[str, Any], str, Any]] = [
        (parent._modules, name, layer) for parent in model.modules() for name, layer in parent._modules.items()
    ]
    wrapped = [child for child in children if isinstance(child[2], BaseLayerWithLoRA)]
    for modules, name, layer in wrapped:
        modules[name] = layer.base_layer
    try:
        yield
    finally:
        for modules, name, layer in wrapped:
            modules[name] = layer


def replace_adapter(lora: Any, tensors: Tensors, scale: float, place: int) -> None:
    """Replace the adapter of a place. `lora`: vLLM's manager in a worker process; generation must be paused. Raises
    vLLM's errors for tensors that do not fit the model."""
    from vllm.lora.peft_helper import PEFTHelper

    manager, rank = lora._adapter_manager, next(iter(tensors.values())).shape[0]
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in _scaled(tensors, scale).items()}
    targets = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in tensors})
    # A scale of 1: the factors have it already, so that what vLLM computes with can be told from them.
    model = lora._lora_model_cls.from_lora_tensors(
        place, named, PEFTHelper(rank, rank, targets), device="cpu", dtype=lora.lora_config.lora_dtype
    )
    manager.remove_adapter(place)
    manager.add_adapter(model)
    manager.activate_adapter(place)


def adapter_fingerprints(lora: Any, tensors: Tensors, scale: float, place: int) -> WeightFingerprints | None:
    """Return what vLLM's layers compute with of these tensors in a place: their own fingerprints where its buffers have
    the same bits, times the scale. Of a factor that is split over processes this is what this one has. None if the
    buffers have another number format."""
    manager, loaded = lora._adapter_manager, _scaled(tensors, scale)
    if place not in manager.lora_index_to_id:
        return WeightFingerprints.of({})
    slot = manager.lora_index_to_id.index(place)

    def read(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
        located = _buffer(manager, slot, name, shape)
        if located is None:
            return None
        part, shard = located
        expected = _cut(loaded[name], shard)
        is_equal = part.dtype == expected.dtype and torch.equal(part.cpu(), expected)
        return (_cut(tensors[name], shard) if is_equal else part), shard

    return held_adapter(tensors, read)


def _scaled(tensors: Tensors, scale: float) -> dict[str, torch.Tensor]:
    """Return A, and scale * B, in memory of their own on the CPU: what is given may be overwritten."""
    return {
        name: (tensor.cpu() * scale).to(tensor.dtype) if name.endswith("lora_B") else tensor.cpu().clone()
        for name, tensor in tensors.items()
    }


def _buffer(manager: Any, slot: int, name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the part of vLLM's buffers that holds a factor, and which part of the factor that is, as `_shard` does;
    None if it has none of the name."""
    module, _, factor = name.rpartition(".")
    places = {module: (module, 0)}
    for packed, parts in manager.packed_modules.items():  # such as q_proj, k_proj and v_proj in qkv_proj
        places |= {part: (packed, number) for number, part in enumerate(parts)}
    packed, number = places[module]
    layer = manager.modules.get(packed)
    if layer is None:
        return None
    stacked = layer.lora_a_stacked if factor == "lora_A" else layer.lora_b_stacked
    shard = _shard(layer, factor, number, len(stacked), shape)
    rows, columns = shard.shape
    return stacked[number][slot, 0, :rows, :columns], shard


def _shard(layer: Any, factor: str, number: int, count: int, shape: torch.Size) -> torch.Tensor:
    """Return the part of a factor that vLLM gives this process, of `count` factors in one layer: a view without memory,
    which has its place and its steps."""
    whole = torch.empty(shape, device="meta")
    if layer.tp_size == 1:
        return whole
    cut = layer.slice_lora_a if factor == "lora_A" else layer.slice_lora_b
    shard: torch.Tensor = (
        cut(whole) if count == 1 else cut([whole if place == number else None for place in range(count)])[number]
    )
    return shard


def _cut(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return that part of a contiguous tensor."""
    return tensor.as_strided(shard.shape, shard.stride(), tensor.storage_offset() + shard.storage_offset())
