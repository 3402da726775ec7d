"""Routers of transformers' models that take recorded experts in the place of their own choice.

N tokens of this rank, E experts, K chosen for each, H model width.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headway.learner.backends.replayed_choice import Recorded
from headway.learner.rows.routing import SOFTMAX_ROUTED


def replayable_routers(layers: Iterable[nn.Module], model_type: str) -> list[nn.Module]:
    """Return the routers of layers with experts, in order, prepared for `replay`; [] if their kind is unknown."""
    if model_type not in SOFTMAX_ROUTED:
        return []
    gates: list[Any] = [getattr(layer.mlp, "gate", None) for layer in layers]
    routers = [gate for gate in gates if hasattr(gate, "top_k")]
    for router in routers:
        router.recorded, router.forward = None, types.MethodType(_route, router)
    return routers


def replay(routers: Iterable[nn.Module], recorded: Recorded | None) -> None:
    """Give the routers the experts to take until this is called again. None: they choose for themselves.

    The backward pass recomputes layers with the same experts, so it must come before the next micro-batch. This is set
    from outside because layers that are recomputed and compiled must have no side effects.
    """
    for number, router in enumerate(routers):
        router.recorded = None if recorded is None else recorded.of_layer(number)  # type: ignore[assignment]


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
