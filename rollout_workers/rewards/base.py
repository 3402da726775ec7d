"""The seam between a worker and whatever judges responses."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from broker.errors import LASTING_EXIT, HeadwayError
from broker.schema import Prompt


class RewardError(HeadwayError):
    """A reward function failed. The worker stops: zeros in place of a bug would be trained on."""

    exit_code = LASTING_EXIT


class UnscoredError(RewardError):
    """One sample cannot be scored; others may be."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one response is worth."""

    total: float
    components: Mapping[str, float] = {}
    """Parts and further measures, for people; only `total` is optimized."""


class Scorer(Protocol):
    """Judges responses, many at a time."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """The score of one response; never blocks the event loop. Raises UnscoredError where this
        sample is to be given up, RewardError where the worker is; never returns NaN."""
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...
