"""Decoder layers are prepared before they are sharded: fused norms, recomputation, compilation.

A layer's `forward` is replaced on the instance, so parameters keep their names. Sharding gathers a layer's parameters
for its forward pass, and again for its recomputation.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.learner.config import ComputeConfig

EXPENSIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "torch_attn::_varlen_attn",
        "headway::flash_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional_autograd::all_to_all_single",
    }
)
"""Operations whose results selective recomputation keeps; it computes all others again."""

Forward = Callable[..., Any]

RECOMPILE_LIMIT = 64
"""Variants of a layer that are compiled: of rows with shared tokens or without, with gradients or without, of a policy,
its reference and its critic, which have one code. Beyond torch's own limit of 8 the layers run uncompiled for good."""


def prepare_layers(layers: Iterable[nn.Module], compute: ComputeConfig) -> None:
    """Recompute and compile as `compute` says. Compilation is outermost, so that the compiler sees recomputation."""
    for layer in layers:
        forward = _recomputed(layer.forward, compute.recompute)
        if compute.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            forward = torch.compile(forward, dynamic=True)  # the number of tokens changes with every micro-batch
        layer.forward = forward


def hand_on_layouts(layers: Iterable[nn.Module]) -> None:
    """Give the bounds of packed sequences to attention to which its layer hands no further arguments on: as an
    attribute, set in each forward pass and in each recomputation, in front of which this comes."""
    for layer in layers:
        attention = [part for part in layer.modules() if "ALL_ATTENTION_FUNCTIONS" in _source(part)]
        if not all(_hands_on(part) for part in (layer, *attention)):
            layer.forward = functools.partial(_with_attribute, layer.forward, attention)


def _with_attribute(
    forward: Forward, attention: list[nn.Module], *args: Any, packed_layout: Any = None, **kwargs: Any
) -> Any:
    for part in attention:
        part.packed_layout = packed_layout
    return forward(*args, **kwargs)


def _hands_on(part: nn.Module) -> bool:
    """Return whether the module takes further arguments and hands them on, by its source: `**kwargs` stands there at
    least twice. A wrong answer costs nothing but words: attention without a layout raises."""
    return _source(part).count("**kwargs") > 1


def _source(part: nn.Module) -> str:
    try:
        return inspect.getsource(type(part).forward)
    except (OSError, TypeError):
        return ""


def _recomputed(forward: Forward, recompute: str) -> Forward:
    if recompute == "none":
        return forward
    again = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if recompute == "full":
        return again
    return functools.partial(again, context_fn=_keep_expensive)


def _keep_expensive() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = getattr(operation, "_schema", None)  # operators of higher order have none
    is_expensive = schema is not None and schema.name in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def fuse_norms(model: nn.Module) -> None:
    """Use torch's fused RMSNorm, one kernel for each pass, in the place of norms that compute the same in several.

    In bfloat16 it rounds once, after the multiplication by the weight; most norms of transformers also round before it.
    """
    for module in model.modules():
        kind: Any = type(module)
        if _is_rms_norm(kind):
            module.forward = types.MethodType(_rms_norm, module)


@functools.cache
def _is_rms_norm(kind: Callable[..., nn.Module]) -> bool:
    """Return whether the class computes x / rms(x) * weight, found by trying: Gemma's multiplies by 1 + weight."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        norm: Any = kind(8)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, 8))
            rows = torch.linspace(-3, 1, 24).view(3, 8).square()
            return set(dict(norm.named_parameters())) == {"weight"} and torch.allclose(
                norm(rows), _rms_norm(norm, rows)
            )
    except (AttributeError, TypeError):
        return False


def _rms_norm(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)
