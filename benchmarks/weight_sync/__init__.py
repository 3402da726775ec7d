"""The seconds from a learner's step to the first token of its version in an engine that generates all the while.

__main__ ─┬─► learner.py: random weights of a shape, through the product's Publisher ─┐ broadcast
          ├─► engine.py: takes each version as a worker does                        ◄─┘
          └─► native.py: vLLM's own transfer of the same tensors, as the peer
"""

from typing import Any

import msgspec

REST_S = 2.0
"""Seconds between a held version and the next one, in which caches are computed anew, and requests begin and end."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sending one model's weights, the same for both ends."""

    model: str
    """The directory of the model's config.json."""
    dtype: str
    device: str
    """The device of the learner's tensors."""
    transport: str
    staging: str
    versions: int
    """The number of versions. The first is pulled, and an engine's loader is traced with it."""
    engine: str
    requests: int
    """The number of requests that the engine generates at any time."""
    new_tokens: int
    kv_policy: str
    """The engine's policy for the caches of running requests at a swap."""
    options: dict[str, Any]
    """The engine's options."""
    bucket_bytes: int = 1 << 30
    timeout_s: float = 30.0
    """The deadline of a broadcast."""
