"""The experts of a mixture: a faster forward for models that have few of them, and a record of which were chosen.

A model with few experts gives each token to all of them, and what was not chosen counts nothing. With four experts, two
of them chosen, a hundred tokens take half of the time on a CPU that sorting them by expert takes: two products instead
of many small calls. T tokens, E experts, K chosen ones, I width of an expert.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from headway.broker.schema import Experts

EXPERTS = "headway_all_experts"
MOST_WASTED = 2
"""Experts for each chosen one up to which this is faster."""


def all_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return [T, width] the weighted sum of the chosen experts' outputs, as transformers' grouped experts do, which
    get what this function is no faster for."""
    if not _is_for(experts, top_k_index.shape[-1]):
        grouped: torch.Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return grouped
    count, gate_up, down = experts.num_experts, experts.gate_up_proj, experts.down_proj
    hidden_TEI = F.linear(hidden_states, gate_up.flatten(0, 1)).view(len(hidden_states), count, -1)
    share_TE = top_k_weights.new_zeros(len(hidden_states), count).scatter_(1, top_k_index, top_k_weights)
    weighted_TEI = experts._apply_gate(hidden_TEI) * share_TE[:, :, None]
    out: torch.Tensor = weighted_TEI.flatten(1).to(down.dtype) @ down.transpose(1, 2).flatten(0, 1)
    return out


def _is_for(experts: Any, chosen: int) -> bool:
    is_spread = getattr(experts, "_is_expert_parallel", False)  # which transformers before 5.18 do not have
    is_plain = experts.has_gate and not (experts.has_bias or experts.is_transposed or is_spread)
    is_on_cpu = experts.gate_up_proj.device.type == "cpu"
    return bool(is_plain and is_on_cpu and experts.num_experts <= MOST_WASTED * chosen)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, all_experts)


class RouterTap:
    """Listens to the expert modules of every layer, to which transformers passes the choice of the layer's router."""

    def __init__(self, model: nn.Module) -> None:
        self._experts: list[Any] = [
            part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "num_experts")
        ]
        self._chosen: list[torch.Tensor] = []

    @property
    def is_dense(self) -> bool:
        return not self._experts

    def listen(self) -> None:
        """Listen from the next forward on. Idempotent. Before the first call it costs nothing and refuses no model."""
        if self._chosen:
            return
        self._chosen = [torch.empty(0)] * len(self._experts)
        for layer, part in enumerate(self._experts):
            part.register_forward_pre_hook(self._listener(layer))

    def last(self) -> Experts:
        """Return [T, layers, experts per token] of the last forward, in the order of the router's choice."""
        is_byte = all(part.num_experts <= 256 for part in self._experts)
        chosen_TLK = torch.stack(self._chosen, dim=1).to(torch.uint8 if is_byte else torch.uint16).cpu()
        array: Experts = np.asarray(chosen_TLK.numpy())
        return array

    def _listener(self, layer: int) -> Any:
        def listen(experts: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            _tokens_TH, self._chosen[layer], _weights_TK = arguments

        return listen
