"""Records which experts a model's last forward chose. T tokens."""

from typing import Any

import numpy as np
import torch
from torch import nn

from headway.broker.schema import Experts


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
