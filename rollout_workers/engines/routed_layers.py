"""The layers of a model that have experts, as rows of `Chunk.experts` for an engine that reports every layer."""

import re
from typing import NamedTuple

import numpy as np
import torch

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RoutedLayers(NamedTuple):
    """The layers that have experts, of a model whose engine's rows have a place for every layer."""

    layers: tuple[int, ...]
    is_byte: bool
    """Whether the number of an expert fits into eight bits."""

    def rows(self, routed: Experts) -> Experts:
        """Return [T, layers with experts, experts per token]."""
        kept = routed if len(self.layers) == routed.shape[1] else routed[:, self.layers]
        return kept.astype(np.uint8 if self.is_byte else np.uint16, copy=False)


def routed_layers(shapes: torch.nn.Module) -> RoutedLayers:
    """Find the layers of a transformers model that have experts. Raises HeadwayError if there are none."""
    experts = {
        int(match[1]): int(part.num_experts)
        for name, part in shapes.named_modules()
        if hasattr(part, "has_gate") and hasattr(part, "num_experts") and (match := _LAYER.search(name))
    }
    if not experts:
        raise HeadwayError("this model has no experts that routers choose: set algorithm.router_replay=false")
    return RoutedLayers(tuple(sorted(experts)), max(experts.values()) <= 256)
