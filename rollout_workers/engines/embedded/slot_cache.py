"""Attention with a KV cache of fixed places, under the unchanged forward of any transformers causal LM.

One forward takes T packed tokens: first those of beginnings that are new to the cache (prefill), then the
newest token of each sequence, whose other tokens are in the cache by then (decode). Shapes: T packed tokens,
P places of the cache that they fill, N sequences, H query heads, K key-value heads, L longest sequence, D head
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from headway.rollout_workers.engines.base import EngineOptionsError

ATTENTION = "headway_slots"

_GROWTH = 64
"""Length from which the cache grows by doubling, so that memory follows what is used instead of what is allowed."""


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    keys: torch.Tensor
    """[slots, K, D, length]: a query times keys that lie like this takes a third of the time on a CPU."""
    values: torch.Tensor
    """[slots, K, length, D]"""


class SlotCache:
    """Keys and values of `slots` running sequences."""

    def __init__(self, slots: int, max_len: int) -> None:
        self._slots = slots
        self._max_len = max_len
        self._length = min(_GROWTH, max_len)
        self._layers: dict[int, LayerCache] = {}

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self._length:
            return
        old, self._length = self._length, min(self._max_len, max(length, 2 * self._length))
        for index, layer in self._layers.items():
            grown = self._empty(layer.keys.transpose(2, 3), layer.values)
            grown.keys[..., :old] = layer.keys
            grown.values[..., :old, :] = layer.values
            self._layers[index] = grown

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """Return what is held of a layer with keys and values like these, [any, K, any, D]; D of both may differ."""
        if index not in self._layers:
            self._layers[index] = self._empty(key, value)
        return self._layers[index]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots to others, none of which is among `sources`."""
        for layer in self._layers.values():
            source, target = torch.tensor([sources, targets], device=layer.keys.device)
            for states in layer:
                states.index_copy_(0, target, states.index_select(0, source))

    def _empty(self, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """Return new memory, which is zeroed: a masked NaN still spoils a sum."""
        return LayerCache(
            key.new_zeros(self._slots, key.shape[1], key.shape[3], self._length),
            value.new_zeros(self._slots, value.shape[1], self._length, value.shape[3]),
        )


@dataclass(frozen=True)
class Prefill:
    """Beginnings of sequences, each of which attends only to itself."""

    tokens: int
    """Number of the packed tokens that are theirs: the first ones."""
    sequences: torch.Tensor
    """[T] the sequence that each token belongs to."""
    positions: torch.Tensor
    """[T] each token's position in its sequence."""
    count: int
    longest: int


@dataclass(frozen=True)
class Decode:
    """The newest token of each sequence, the last packed tokens."""

    slots: slice | torch.Tensor
    """A slice if the slots are a prefix of the cache, which saves a copy."""
    bias: torch.Tensor
    """[N, 1, 1, L] 0 where a key exists, -inf elsewhere."""


@dataclass(frozen=True)
class SlotLayout:
    """The places of the T packed tokens of one forward, and the cache for their keys and values."""

    cache: SlotCache | None
    """None: keys and values are not kept (scoring)."""
    slots: torch.Tensor
    """[P] the slot of each filled place."""
    positions: torch.Tensor
    """[P] its position in the slot's sequence."""
    sources: torch.Tensor | None
    """[P] the packed token that each place gets; None: the T tokens in their order. Several slots may share one."""
    prefill: Prefill | None
    decode: Decode | None
    asked: set[nn.Module] | None = None
    """Gets each module that asks `slot_attention`; None: they are not counted."""


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """Attend with [1, H, T, D] queries to [1, K, T, D] keys and values; returns [1, T, H, D] and fills the cache. The
    layout is the module's attribute `headway_layout`: not every model hands further arguments on to its attention."""
    layout = getattr(module, "headway_layout", None)
    refuse_extras(module, layout, attention_mask, extras)
    assert isinstance(layout, SlotLayout)
    if layout.asked is not None:
        layout.asked.add(module)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TKD, v_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    cached = None
    if layout.cache is not None:
        cached = layout.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
        k_PKD, v_PKD = (k_TKD, v_TKD) if layout.sources is None else (k_TKD[layout.sources], v_TKD[layout.sources])
        cached.keys[layout.slots, :, :, layout.positions] = k_PKD
        cached.values[layout.slots, :, layout.positions] = v_PKD
    parts, new = [], 0
    if layout.prefill is not None:
        new = layout.prefill.tokens
        parts.append(attend_new(q_THD[:new], k_TKD[:new], v_TKD[:new], scaling, layout.prefill))
    if layout.decode is not None and cached is not None:
        parts.append(attend_cached(q_THD[new:], cached, scaling, layout.decode))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def attend_new(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scaling: float, prefill: Prefill
) -> torch.Tensor:
    """Attend causally within each sequence. Right padding needs no mask: no token looks to its right."""

    def padded(states: torch.Tensor) -> torch.Tensor:
        rows = states.new_zeros(prefill.count, prefill.longest, *states.shape[1:])
        rows[prefill.sequences, prefill.positions] = states
        return rows.transpose(1, 2)

    out = F.scaled_dot_product_attention(
        padded(q_THD), padded(k_TKD), padded(v_TKD), is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)[prefill.sequences, prefill.positions]


def attend_cached(q_NHD: torch.Tensor, cached: LayerCache, scaling: float, decode: Decode) -> torch.Tensor:
    """Attend with one query token per sequence. The H / K queries that share a key are the rows of one small
    product. For these, a CPU is several times as fast with two plain products as with PyTorch's fused attention."""
    length = decode.bias.shape[-1]
    keys, values = cached.keys[decode.slots, ..., :length], cached.values[decode.slots, :, :length]
    shared = (q_NHD * scaling).view(q_NHD.shape[0], keys.shape[1], -1, q_NHD.shape[2])
    weights = (torch.matmul(shared, keys) + decode.bias).softmax(dim=-1).to(values.dtype)
    return torch.matmul(weights, values).reshape(*q_NHD.shape[:2], values.shape[-1])


def refuse_extras(
    module: nn.Module, layout: SlotLayout | None, attention_mask: torch.Tensor | None, extras: dict[str, object]
) -> None:
    """Raise EngineOptionsError for attention variants that this function would compute wrongly."""
    found = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if extras.get(name) is not None]
    if attention_mask is not None:
        found.append("a mask of its own")
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        found.append("tokens that see later ones")
    if layout is None or not hasattr(module, "layer_idx"):
        found.append("layers that it cannot tell apart")
    if found:
        raise EngineOptionsError(
            f"the embedded engine has no attention with {' and '.join(found)}; use engine.kind=vllm for this model"
        )


# transformers passes no mask to an attention function without a mask function of the same name.
AttentionInterface.register(ATTENTION, slot_attention)
