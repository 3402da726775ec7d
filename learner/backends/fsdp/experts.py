"""Choice of how a model's experts compute: its own loop, transformers' grouped multiplications, or ours.

Routers of transformers' models can take the recorded experts of a batch in the place of their own choice.

Ours, registered with transformers as "headway_grouped", moves rows by gathers in both directions
(`learner/backends/moe.py`). Shapes: T tokens, K experts chosen for each, H model width.
"""

import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from headway.learner.backends.moe import RecordedExperts, grouped_experts
from headway.learner.batching.router_replay import SOFTMAX_ROUTED
from headway.learner.models.shape import num_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPERTS_NAME = "headway_grouped"

PLAIN = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""transformers' flags on experts that are down(silu(gate(x)) * up(x)), with gate and up in one tensor."""


def experts_implementation(model: "PreTrainedModel", few: int) -> str:
    """Return the `experts_implementation` for transformers, registered with it; up to `few` experts run one by one."""
    if num_experts(model.config) <= few:
        return "eager"
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _grouped)
    experts = [part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "down_proj")]
    return EXPERTS_NAME if all(is_plain(part) for part in experts) else "grouped_mm"


def is_plain(experts: Any) -> bool:
    """Return whether experts of a layer are down(silu(gate(x)) * up(x)), with gate and up in one tensor."""
    from transformers.integrations import moe

    own_gate = getattr(type(experts), "_apply_gate", None)
    flags = {name: getattr(experts, name, None) for name in PLAIN}
    return flags == PLAIN and own_gate is getattr(moe, "_default_apply_gate", None) and _is_silu(experts.act_fn)


def _is_silu(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether the activation is SiLU, found by trying it, since SiLU has several classes."""
    numbers = torch.linspace(-5, 5, 101)
    return torch.allclose(activation(numbers), F.silu(numbers))


def _grouped(experts: Any, tokens_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, H], in the dtype of the tokens.

    torch's grouped product on a GPU, and its compiler's, takes bfloat16 only; transformers has one for other dtypes.
    """
    if tokens_TH.dtype is not torch.bfloat16 and (tokens_TH.is_cuda or torch.compiler.is_compiling()):
        output_TH: torch.Tensor = grouped_mm_experts_forward(experts, tokens_TH, experts_TK, weights_TK)
        return output_TH
    output_TH = grouped_experts(tokens_TH, experts_TK, weights_TK, experts.gate_up_proj, experts.down_proj)
    return output_TH.to(tokens_TH.dtype)


def replayable_routers(layers: Iterable[nn.Module], model_type: str) -> list[nn.Module]:
    """Return the routers of layers with experts, in order, prepared for `replay`; [] if their kind is unknown."""
    if model_type not in SOFTMAX_ROUTED:
        return []
    gates: list[Any] = [getattr(layer.mlp, "gate", None) for layer in layers]
    routers = [gate for gate in gates if hasattr(gate, "top_k")]
    for router in routers:
        router.recorded, router.forward = None, types.MethodType(_route, router)
    return routers


def replay(routers: Iterable[nn.Module], recorded: RecordedExperts | None) -> None:
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
