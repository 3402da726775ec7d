"""Attention alone: the kernels that this torch has for packed sequences, forward and backward.

B sequences of L tokens, T = B * L packed ones, H query heads, K key/value heads, D their width.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from headway.learner.models.attention import _varlen_options
from headway.learner.models.flash_attention import flash_attention

from .clock import timed, wait

LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The sizes of queries, keys and values."""

    sequences: int
    length: int
    heads: int
    key_value_heads: int
    width: int

    @property
    def flops(self) -> float:
        """The operations of the forward and the backward pass, of the causal half."""
        return 3.5 * 4 * self.sequences * self.length**2 * self.heads * self.width / 2


SHAPES = {
    "smollm2, 128 x 114": Attended(sequences=128, length=114, heads=9, key_value_heads=3, width=64),
    "smollm2, 128 x 512": Attended(sequences=128, length=512, heads=9, key_value_heads=3, width=64),
    "1.7b, 32 x 1024": Attended(sequences=32, length=1024, heads=16, key_value_heads=8, width=128),
    "1.7b, 8 x 4096": Attended(sequences=8, length=4096, heads=16, key_value_heads=8, width=128),
    "8b, 2 x 16384": Attended(sequences=2, length=16384, heads=32, key_value_heads=8, width=128),
}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measured(shape: Attended) -> dict[str, Any]:
    """Return every kernel's milliseconds of a forward and backward pass and its TFLOP/s, or its refusal."""
    tokens = shape.sequences * shape.length
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    query_THD = torch.randn(tokens, shape.heads, shape.width, **options)
    key_TKD, value_TKD = (torch.randn(tokens, shape.key_value_heads, shape.width, **options) for _ in range(2))
    gradient_THD = torch.randn_like(query_THD)
    found: dict[str, Any] = {}
    wanted: torch.Tensor | None = None
    for name, attend in _kernels(shape):

        def both(attend: Attend = attend) -> torch.Tensor:
            attended_THD = attend(query_THD, key_TKD, value_TKD)
            torch.autograd.grad(attended_THD, (query_THD, key_TKD, value_TKD), gradient_THD)
            return attended_THD.detach()

        try:
            began = time.perf_counter()
            attended_THD = both()
            wait()
            first_s = round(time.perf_counter() - began, 2)
            wanted = attended_THD if wanted is None else wanted
            figures: dict[str, Any] = {"first_s": first_s} | timed(both, repeats=9)
            with torch.no_grad():
                figures["forward_ms"] = timed(lambda: attend(query_THD, key_TKD, value_TKD), repeats=9)["ms"]  # noqa: B023
            figures["tflops"] = round(shape.flops / figures["ms"] / 1e9, 1)
            figures["off"] = float((attended_THD.float() - wanted.float()).abs().max())
            found[name] = figures
        except Exception as error:  # noqa: BLE001  # a kernel refuses shapes in many ways
            found[name] = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    return found


def _kernels(shape: Attended) -> Iterator[tuple[str, Attend]]:
    bounds = torch.arange(shape.sequences + 1, device="cuda", dtype=torch.int32) * shape.length
    grouped = {"is_grouped": shape.heads != shape.key_value_heads}

    def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        options = _varlen_options(**grouped)
        attended = varlen_attn(query, key, value, bounds, bounds, shape.length, shape.length, **options)
        assert isinstance(attended, torch.Tensor)
        return attended

    yield "varlen", varlen
    yield "flash-attn-4", _flash_attn_4(shape, bounds)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        yield f"padded, {backend.name}", _padded(shape, backend)
    yield "padded, keys repeated, CUDNN_ATTENTION", _padded(shape, SDPBackend.CUDNN_ATTENTION, repeats=True)
    yield "nested, CUDNN_ATTENTION", _nested(shape, SDPBackend.CUDNN_ATTENTION)
    yield "cudnn with bounds", _cudnn(bounds, shape)
    yield "cudnn with bounds, keys repeated", _cudnn(bounds, shape, repeats=True)


def _padded(shape: Attended, backend: SDPBackend, *, repeats: bool = False) -> Attend:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if repeats:
            key, value = _repeated(key, shape), _repeated(value, shape)
        size = (shape.sequences, shape.length)
        q, k, v = (one.view(*size, *one.shape[1:]).transpose(1, 2) for one in (query, key, value))
        with sdpa_kernel(backend):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeats)
        return attended.transpose(1, 2).flatten(0, 1)

    return attend


def _repeated(rows: torch.Tensor, shape: Attended) -> torch.Tensor:
    return rows.repeat_interleave(shape.heads // shape.key_value_heads, dim=1)


def _nested(shape: Attended, backend: SDPBackend) -> Attend:
    bounds = torch.arange(shape.sequences + 1, device="cuda") * shape.length

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                one, bounds, min_seqlen=shape.length, max_seqlen=shape.length
            ).transpose(1, 2)
            for one in (query, _repeated(key, shape), _repeated(value, shape))
        )
        with sdpa_kernel(backend):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).values()

    return attend


def _flash_attn_4(shape: Attended, bounds: torch.Tensor) -> Attend:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        longest, scale = shape.length, shape.width**-0.5
        attended_THD, _ = flash_attention(query, key, value, bounds, bounds, longest, longest, scale)
        assert isinstance(attended_THD, torch.Tensor)
        return attended_THD

    return attend


def _cudnn(bounds: torch.Tensor, shape: Attended, *, repeats: bool = False) -> Attend:
    """Return the kernel that torch's variable-length attention has and never takes; it tells no autograd of it."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if repeats:
            key, value = _repeated(key, shape), _repeated(value, shape)
        attended: torch.Tensor = _Cudnn.apply(query, key, value, bounds, shape.length)  # type: ignore[no-untyped-call]
        return attended

    return attend


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int
    ) -> torch.Tensor:
        found = torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, bounds, bounds, longest, longest, True, 0.0, True, False
        )
        attended: torch.Tensor = found[0]
        ctx.save_for_backward(query, key, value, attended, found[1], bounds, found[6], found[7])
        ctx.longest = longest
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, lse, bounds, seed, offset = ctx.saved_tensors
        bounded = (bounds, bounds, ctx.longest, ctx.longest)
        found = torch.ops.aten._cudnn_attention_backward(
            gradients[0].contiguous(), query, key, value, attended, lse, seed, offset, None, *bounded, 0.0, True
        )
        return (*found[:3], None, None)
