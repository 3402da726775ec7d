"""Adapters in one of SGLang's schedulers, each under the name of its place in SGLang's own memory pool for LoRA.

SGLang has a slot for every place and one more, which requests without an adapter take, so it evicts none. It computes
`scale * B (A x)` from the published bits, with the scale beside them. Its key of the prefix cache has the name of a
request's adapter, which never changes for a place: the engine's salt tells versions apart.
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from headway.broker.errors import HeadwayError, WeightSyncError
from headway.rollout_workers.engines.base import WeightFingerprints
from headway.rollout_workers.engines.weight_loading.engine_adapters import decoder_linears, held_adapter

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's layers in which the factors of several are stacked, in this order."""

MERGED = "set weights.adapter=merged, with which all versions are whole weights"

Tensors = Mapping[str, torch.Tensor]


def can_pin() -> bool:
    """Return whether this machine has pinned memory: SGLang sets up layers with adapters by it, and keeps rows of
    experts there."""
    return torch.cuda.is_available()


def adapter_arguments(rank: int, places: int, shapes: nn.Module) -> dict[str, Any]:
    """Return what SGLang is started with, to hold so many adapters of this rank for the decoder's linear layers;
    nothing for rank 0. Raises HeadwayError where it cannot: on a CPU, and in releases that take no adapters as
    tensors."""
    if not rank:
        return {}
    if not can_pin():
        raise HeadwayError(f"SGLang computes adapters on GPUs only (it pins memory for them): {MERGED}")
    from sglang.srt.lora.lora_manager import LoRAManager

    if not hasattr(LoRAManager, "load_lora_adapter_from_tensors"):
        raise HeadwayError(f"this release of SGLang takes no adapters as tensors: install 0.5.17 or newer, or {MERGED}")
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "lora_target_modules": decoder_linears(shapes),
        "max_loras_per_batch": places + 1,
        **({} if torch.cuda.is_available() else {"lora_backend": "torch_native"}),
    }


def adapter_name(place: int) -> str | None:
    """Return the name by which requests ask for the adapter of a place; None for 0."""
    return f"headway-{place}" if place else None


def _reference(place: int) -> Any:
    """Return SGLang's record of the adapter of a place. Nothing is at its path."""
    from sglang.srt.lora.lora_registry import LoRARef

    name = adapter_name(place)
    return LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)


async def make_known(front: Any, place: int) -> None:
    """Let SGLang's front end take requests that name the place."""
    if adapter_name(place) not in front.lora_registry.get_all_adapters():
        await front.lora_registry.register(_reference(place))


class PooledAdapters:
    """The adapters of one scheduler."""

    def __init__(self, model: nn.Module) -> None:
        """Raises WeightSyncError if SGLang was started without adapters."""
        self._manager = _manager_of(model)
        self._layers = {name: layer for layers in self._manager.lora_modules for name, layer in layers.items()}

    def take(self, tensors: Tensors, scale: float, place: int) -> WeightFingerprints | None:
        """Replace the adapter of a place, whose requests must have ended, and return what SGLang's layers compute with
        of these tensors. Raises WeightSyncError, or SGLang's errors, for tensors that do not fit the model."""
        reference = _reference(place)
        rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A"))
        layers = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors}
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": sorted(layers)}
        # In memory of its own: SGLang keeps the factors, and what is given may be overwritten.
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in self._completed(tensors, rank).items()}
        named = {f"base_model.model.{name}.weight": tensor for name, tensor in copies.items()}
        if reference.lora_id in self._manager.lora_refs:
            _agreed(self._manager.unload_lora_adapter(reference))
        for left in (self._manager.configs, self._manager.loras):  # by a load that failed
            left.pop(reference.lora_id, None)
        _agreed(self._manager.load_lora_adapter_from_tensors(reference, named, config))
        self._manager.fetch_new_loras({reference.lora_id})  # now, and not with the first request that names it
        slot = self._manager.memory_pool.get_buffer_id(reference.lora_id)
        return held_adapter(tensors, lambda name, shape: self._buffer(slot, name, shape))

    def _completed(self, tensors: Tensors, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors, with zeros for what is stacked with them: SGLang stacks all or nothing."""
        found = dict(tensors)
        for module in {name.rpartition(".")[0] for name in tensors}:
            packed, _ = _packed(module)
            if packed == module or packed not in self._layers:
                continue
            prefix, sizes = packed.rpartition(".")[0], self._layers[packed].base_layer.output_sizes
            first = tensors[f"{module}.lora_A"]
            for part, rows in zip(PACKED[packed.rpartition(".")[2]], sizes, strict=True):
                found.setdefault(f"{prefix}.{part}.lora_A", torch.zeros_like(first))
                found.setdefault(f"{prefix}.{part}.lora_B", first.new_zeros(rows, rank))
        return found

    def _buffer(self, slot: int, name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the part of the pool that holds a factor, as `held_adapter` wants it; None if no layer computes with
        one of the name."""
        from sglang.srt.lora.utils import LoRAType

        module, _, factor = name.rpartition(".")
        packed, number = (module, 0) if module in self._layers else _packed(module)
        layer = self._layers.get(packed)
        if layer is None:
            return None
        of_layer = next(number for number, layers in enumerate(self._manager.lora_modules) if packed in layers)
        kind = LoRAType.LORA_A if factor == "lora_A" else LoRAType.LORA_B
        pool = self._manager.memory_pool.get_tensor(packed.rpartition(".")[2], of_layer, kind)
        if not layer.set_lora or all(one is not pool for one in vars(layer).values()):
            return None
        rows, columns = shape
        sizes = layer.base_layer.output_sizes if number else ()
        first = number * rows if factor == "lora_A" else sum(sizes[:number])
        return pool[slot, first : first + rows, :columns], torch.empty(shape, device="meta")


def _packed(module: str) -> tuple[str, int]:
    """Return the layer that holds this one's factors, and the place there; of one that is alone, itself and 0."""
    prefix, _, last = module.rpartition(".")
    for packed, parts in PACKED.items():
        if last in parts:
            return f"{prefix}.{packed}", parts.index(last)
    return module, 0


def _manager_of(model: nn.Module) -> Any:
    """Return SGLang's manager of adapters. SGLang hands a loader the model alone, which does not know it."""
    from sglang.srt.lora.lora_manager import LoRAManager

    for one in gc.get_objects():
        if issubclass(type(one), LoRAManager) and one.base_model is model:
            return one
    raise WeightSyncError("SGLang was started without adapters")


def _agreed(result: Any) -> None:
    if not result.success:
        raise WeightSyncError(result.error_message)
