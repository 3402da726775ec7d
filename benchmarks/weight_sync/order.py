"""What both ends of one measurement are told."""

from typing import Any

import msgspec

REST_S = 2.0
"""Between a version that is held and the next one: caches are computed anew, and requests begin and end."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sending one model's weights."""

    model: str
    """Directory of its config.json."""
    dtype: str
    device: str
    """Of the learner's tensors."""
    transport: str
    staging: str
    bucket_bytes: int
    timeout_s: float
    versions: int
    """The first is pulled, and an engine's loader is traced with it."""
    engine: str
    requests: int
    """That the engine generates all the while."""
    new_tokens: int
    kv_policy: str
    """Of the engine: what a swap does to the caches of running requests."""
    options: dict[str, Any]
    """Of the engine."""
