"""Choice of how a model's experts compute: its own loop, transformers' grouped multiplications, or ours.

Ours, registered with transformers as "headway_grouped", moves rows by gathers in both directions
(`learner/backends/expert_rows.py`). Shapes: T tokens, K experts chosen for each, H model width.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from headway.learner.backends.expert_rows import grouped_experts
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
    said = {name: getattr(experts, name, None) for name in PLAIN}
    return said == PLAIN and own_gate is getattr(moe, "_default_apply_gate", None) and _is_silu(experts.act_fn)


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
