"""Routers of transformers' models that take recorded experts in the place of their own choice.

N tokens of this rank, E experts, K chosen for each, H model width.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from learner.backends.replayed_choice import Recorded
from learner.routing import SOFTMAX_ROUTED


def make_replayable(layers: Iterable[nn.Module], model_type: str) -> bool:
    """Have decoder layers take `recorded: Recorded | None`; False where the routers are unknown or there are none.

    To be called before anything wraps their `forward`: what is recomputed in the backward pass then takes the choices
    of its own forward pass.
    """
    if model_type not in SOFTMAX_ROUTED:
        return False
    number = 0
    for layer in layers:
        router: Any = getattr(layer.mlp, "gate", None)
        is_routed = hasattr(router, "top_k")
        layer.forward = functools.partial(_layer, layer.forward, router if is_routed else None, number)
        if is_routed:
            router.recorded, router.forward = None, types.MethodType(_route, router)
            number += 1
    return number > 0


def _layer(
    forward: Callable[..., Any], router: Any, number: int, *args: Any, recorded: Recorded | None = None, **options: Any
) -> Any:
    if router is not None:
        router.recorded = None if recorded is None else recorded.of_layer(number)
    return forward(*args, **options)


def _route(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([N, E] logits, [N, K] weights, [N, K] experts), as the router's own class computes them."""
    if router.recorded is None:
        own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = type(router).forward(router, hidden)
        return own
    logits_NE = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    probabilities_NE = logits_NE.softmax(-1, dtype=torch.float32)
    experts_NK = router.recorded.instead_of(probabilities_NE.topk(router.top_k, -1).indices)
    weights_NK = probabilities_NE.gather(1, experts_NK)
    if router.norm_topk_prob:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return logits_NE, weights_NK.to(logits_NE.dtype), experts_NK
