"""Which experts vLLM's routers chose (`enable_return_routed_experts`), as rows of `Chunk.experts`.

vLLM's engine sends with a request's first token the rows of its prompt from `routed_experts_prompt_start` on, and with
every other token the row of the token before it; what it computes anew, after a swap or for want of cache, it does not
send again. That is what a chunk promises. Only its public output is no use here: that has all rows at the very end. So
they are taken from where its front end gathers them. Read in vLLM 0.26 and 0.32.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from broker.errors import HeadwayError
from broker.schema import Experts
from rollout_workers.engines.base import GenerationRequest

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RoutedLayers(NamedTuple):
    """Where a model has experts. vLLM's rows have a place for every layer."""

    layers: tuple[int, ...]
    is_byte: bool
    """Whether the number of an expert fits into eight bits."""

    def rows(self, routed: Experts) -> Experts:
        """[T, layers with experts, experts per token]"""
        kept = routed if len(self.layers) == routed.shape[1] else routed[:, self.layers]
        return kept.astype(np.uint8 if self.is_byte else np.uint16, copy=False)


def routed_layers(shapes: torch.nn.Module) -> RoutedLayers:
    """Of a transformers model. Raises HeadwayError for one without experts."""
    experts = {
        int(match[1]): int(part.num_experts)
        for name, part in shapes.named_modules()
        if hasattr(part, "has_gate") and hasattr(part, "num_experts") and (match := _LAYER.search(name))
    }
    if not experts:
        raise HeadwayError("this model has no experts that routers choose: set algorithm.router_replay=false")
    return RoutedLayers(tuple(sorted(experts)), max(experts.values()) <= 256)


def engine_arguments(options: Mapping[str, object]) -> dict[str, Any]:
    """What vLLM is started with. Raises HeadwayError where it cannot tell: on a CPU, and split into stages."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise HeadwayError(
            "vLLM tells which experts it chose on GPUs only (it takes Triton): set engine.kind=embedded, or"
            " algorithm.router_replay=false"
        )
    if options.get("pipeline_parallel_size", 1) != 1:
        raise HeadwayError(
            "vLLM does not tell which experts it chose with engine.options.pipeline_parallel_size="
            f"{options['pipeline_parallel_size']}: set it to 1, or algorithm.router_replay=false"
        )
    return {"enable_return_routed_experts": True}


def new_rows(request: GenerationRequest, position: int, count: int) -> int:
    """Rows that come with `count` tokens of the response from `position` on."""
    assert request.experts_from is not None
    return count if position else len(request.prompt_tokens) - request.experts_from + count - 1


def take(gathered: list[Experts], count: int) -> Experts:
    """Remove the first rows from what the front end has gathered of a request. Raises HeadwayError for too few."""
    rows = np.concatenate(gathered) if gathered else np.empty((0, 0, 0), np.uint8)
    if len(rows) < count:
        raise HeadwayError(f"vLLM told the experts of {len(rows)} tokens where it fed {count}: a bug in its adapter")
    gathered[:] = [rows[count:]] if len(rows) > count else []
    return rows[:count]
