"""Attention with a KV cache of fixed places, under the unchanged forward of any transformers causal LM.

One forward takes T packed tokens: first those of whole sequences that are new to the cache (prefill), then
one token of each sequence that is in it already (decode). Shapes: T packed tokens, N sequences, H query
heads, K key-value heads, L longest sequence, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from broker.errors import HeadwayError

ATTENTION = "headway_slots"

_GROWTH = 64
"""Length from which the cache grows by doubling, so that memory follows what is used instead of what is allowed."""


class SlotCache:
    """Keys and values of `slots` running sequences: [slots, K, length, D] for each layer."""

    def __init__(self, slots: int, max_len: int) -> None:
        self._slots = slots
        self._max_len = max_len
        self._length = min(_GROWTH, max_len)
        self._layers: dict[int, torch.Tensor] = {}

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self._length:
            return
        old, self._length = self._length, min(self._max_len, max(length, 2 * self._length))
        for index, layer in self._layers.items():
            grown = layer.new_zeros(*layer.shape[:3], self._length, layer.shape[4])
            grown[..., :old, :] = layer
            self._layers[index] = grown

    def layer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return [2, slots, K, length, D] keys and values of a layer. New memory is zeroed: a masked NaN still spoils a
        sum."""
        if index not in self._layers:
            shape = (2, self._slots, like.shape[1], self._length, like.shape[3])
            self._layers[index] = like.new_zeros(shape)
        return self._layers[index]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for layer in self._layers.values():
            layer[:, target, :, :length] = layer[:, source, :, :length]


@dataclass(frozen=True)
class Prefill:
    """Whole sequences, each of which attends only to itself."""

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
    """One token of each sequence that the cache holds."""

    slots: slice | torch.Tensor
    """A slice if the slots are a prefix of the cache, which saves a copy."""
    mask: torch.Tensor
    """[N, 1, 1, L] true where a key exists."""


@dataclass(frozen=True)
class SlotLayout:
    """The places of the T packed tokens of one forward, and the cache for their keys and values."""

    cache: SlotCache | None
    """None: keys and values are not kept (scoring)."""
    slots: torch.Tensor
    """[T] the slot of each token."""
    positions: torch.Tensor
    """[T] the position of each token in its sequence."""
    prefill: Prefill | None
    decode: Decode | None


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    headway_layout: SlotLayout,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """Attend with [1, H, T, D] queries to [1, K, T, D] keys and values; returns [1, T, H, D] and fills the cache."""
    refuse_extras(extras)
    layout = headway_layout
    q_THD, k_TKD, v_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    cached = None
    if layout.cache is not None:
        cached = layout.cache.layer(int(module.layer_idx), key)  # type: ignore[arg-type]
        cached[0, layout.slots, :, layout.positions] = k_TKD
        cached[1, layout.slots, :, layout.positions] = v_TKD
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


def attend_cached(q_NHD: torch.Tensor, cached: torch.Tensor, scaling: float, decode: Decode) -> torch.Tensor:
    """Attend with one query token per sequence. The H / K queries that share a key are the rows of one small
    product."""
    length = decode.mask.shape[-1]
    keys, values = cached[0, decode.slots, :, :length], cached[1, decode.slots, :, :length]
    shared = q_NHD.reshape(q_NHD.shape[0], keys.shape[1], -1, q_NHD.shape[2])
    out = F.scaled_dot_product_attention(shared, keys, values, attn_mask=decode.mask, scale=scaling)
    return out.reshape(q_NHD.shape)


def refuse_extras(extras: dict[str, object]) -> None:
    """Raise for attention variants that this function would compute wrongly."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if extras.get(name) is not None:
            raise HeadwayError(f"the embedded engine has no attention with {name}; use engine.kind=vllm for this model")


# transformers passes no mask to an attention function without a mask function of the same name.
AttentionInterface.register(ATTENTION, slot_attention)
