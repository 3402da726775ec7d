"""The parts that engines in processes of their own share: calls with a deadline, numbers of requests, expert layers.

Errors of these calls are told apart from Headway's own.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from headway.broker.errors import HeadwayError, WeightSyncError
from headway.broker.schema import Experts

T = TypeVar("T")

DEADLINE_S = 300.0
"""Seconds for each call: an engine may hang instead of failing."""


@dataclass(frozen=True)
class EngineCalls:
    """Calls into the engine that has this name."""

    engine: str

    async def answered(self, what: str, call: Awaitable[T]) -> T:
        """Return the call's answer. Raises WeightSyncError if it fails or takes longer than `DEADLINE_S`."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await call
        except TimeoutError as error:
            raise WeightSyncError(
                f"{self.engine} did not {what} within {DEADLINE_S:.0f} s; restart the worker"
            ) from error
        except HeadwayError:
            raise
        except Exception as error:  # engines raise no narrower one for a call that fails in their processes
            raise WeightSyncError(f"{self.engine} failed to {what}: {error}") from error


log = logging.getLogger(__name__)


def fitting_requests(engine: str, most: int, cache_tokens: int | None, max_model_len: int) -> int:
    """Return how many requests fit the KV cache of an `engine` that was started for `most`; `cache_tokens`: the tokens
    that it holds; None: the engine does not say.

    A request that grows to the longest length has half of it on average, and requests are at all stages of their lives.
    Where nearly all are long at the same time, the engine sets some aside and computes their caches anew later.
    """
    if cache_tokens is None:
        log.info("%s takes %d requests at a time; it does not say what its KV cache holds", engine, most)
        return most
    fitting = max(1, min(most, 2 * cache_tokens // max_model_len))
    log.info(
        "%s takes %d requests at a time: its KV cache holds %d tokens, a request half of engine.max_model_len=%d on"
        " average, and the engine was started for %d",
        engine,
        fitting,
        cache_tokens,
        max_model_len,
        most,
    )
    return fitting


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
