"""Attention by the package flash-attn-4, whose kernels are made for Hopper and Blackwell, if it is installed.

torch's own kernel for packed sequences is made for the GPUs before these. Both count causality from the end of queries
and keys (see `learner.models.attention.varlen_attention`). Forward and backward pass on an H200, milliseconds:

    heads, width, sequences x tokens     torch    flash-attn-4
    9 / 3, 64, 128 x 512                   1.5             1.1
    16 / 8, 128, 32 x 1,024                2.8             1.7
    16 / 8, 128, 8 x 4,096                 7.0             3.7
    32 / 8, 128, 2 x 16,384               47.8            26.1

Its kernels are compiled by the first call for each width and kind, which takes about 6 s, and kept on disk.

T packed tokens, S sequences, H query heads, K key/value heads, D head width.
"""

import functools
import importlib
import logging
import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch

from headway.broker.installation import cache_directory

log = logging.getLogger(__name__)

CAPABILITIES = (9, 10)
"""The GPU generations, by the first number of their compute capability, for which the package has both passes."""
LARGEST_WIDTH = 128
"""The largest head width that is computed by it; others go through torch's kernel."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_available(device: torch.device) -> bool:
    """Return whether the package is installed, can be imported, and is made for this GPU."""
    return _is_available(device)


@functools.cache
def _is_available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return False
    if find_spec("flash_attn") is None or find_spec("cutlass") is None:
        return False
    try:
        _package()
    except Exception as error:  # noqa: BLE001  # it may be of an earlier generation, or for another CUDA
        log.warning("attention goes through torch's kernel, as flash-attn-4 cannot be imported: %s", error)
        return False
    return True


@functools.cache
def _package() -> Any:
    """Return the package's module; its own cache of compiled kernels is off unless it is told before the import."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if (base := cache_directory()) is not None:  # a user without a home gets the package's own directory
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(base / "flash-attention"))
    warnings.filterwarnings("ignore", "Argument aux_data", module="cutlass")  # one for each kernel that is compiled
    return importlib.import_module("flash_attn.cute.interface")


@torch.library.custom_op("headway::flash_attention", mutates_args=())
def flash_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D] causal attention of each of S sequences to itself, and [H, T] fp32 logarithms of the sums.

    Bounds are [S + 1] int32. Raises what the package raises for shapes that it does not take.
    """
    found = _package()._flash_attn_fwd(
        query_THD,
        key_TKD,
        value_TKD,
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )
    return found[0], found[1]


@torch.library.custom_op("headway::flash_attention_backward", mutates_args=())
def _backward_pass(
    gradient_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    attended_THD: torch.Tensor,
    sums_HT: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _package()._flash_attn_bwd(
        query_THD,
        key_TKD,
        value_TKD,
        attended_THD,
        gradient_THD,
        sums_HT,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return found[0], found[1], found[2]


@flash_attention.register_fake
def _(query_THD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = query_THD.shape[:2]
    return torch.empty_like(query_THD), query_THD.new_empty((heads, tokens), dtype=torch.float32)


@_backward_pass.register_fake
def _(
    gradient_THD: torch.Tensor, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query_THD), torch.empty_like(key_TKD), torch.empty_like(value_TKD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, longest_query, longest_key, scale = inputs
    query_THD, key_TKD, value_TKD, cu_queries, cu_keys = tensors
    ctx.save_for_backward(query_THD, key_TKD, value_TKD, *output, cu_queries, cu_keys)
    ctx.sizes = (longest_query, longest_key, scale)


def _gradients(ctx: Any, gradient_THD: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = _backward_pass(gradient_THD.contiguous(), *ctx.saved_tensors, *ctx.sizes)
    return (*found, None, None, None, None, None)


flash_attention.register_autograd(_gradients, setup_context=_keep)
