"""The seam between a worker and whatever judges responses."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from broker.errors import HeadwayError
from broker.schema import Prompt


class RewardError(HeadwayError):
    """A reward function failed. The worker stops: zeros in place of a bug would be trained on."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one response is worth."""

    total: float
    components: Mapping[str, float] = {}
    """Parts and further measures, for people; only `total` is optimized."""


class Scorer(Protocol):
    """Judges responses, many at a time."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """The score of one response; never blocks the event loop. Raises RewardError, never returns NaN."""
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...
