"""Which experts a model's last forward chose. T tokens."""

from typing import Any

import numpy as np
import torch
from torch import nn

from broker.schema import Experts


class RouterTap:
    """Listens at the experts of every layer, which transformers hands what the layer's router chose."""

    def __init__(self, model: nn.Module) -> None:
        experts: list[Any] = [
            part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "num_experts")
        ]
        self.is_dense = not experts
        self._chosen: list[torch.Tensor] = [torch.empty(0)] * len(experts)
        self._dtype = torch.uint8 if all(part.num_experts <= 256 for part in experts) else torch.uint16
        for layer, part in enumerate(experts):
            part.register_forward_pre_hook(self._listener(layer))

    def last(self) -> Experts:
        """[T, layers, experts per token] of the last forward, in the order in which they were chosen."""
        chosen_TLK = torch.stack(self._chosen, dim=1).to(self._dtype).cpu()
        array: Experts = np.asarray(chosen_TLK.numpy())
        return array

    def _listener(self, layer: int) -> Any:
        def listen(experts: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            _tokens_TH, self._chosen[layer], _weights_TK = arguments

        return listen
