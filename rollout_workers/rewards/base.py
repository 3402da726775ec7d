"""The seam between a worker and the functions that judge responses."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headway.broker.errors import LASTING_EXIT, HeadwayError
from headway.broker.schema import Prompt


class RewardError(HeadwayError):
    """A reward function failed. The worker stops: a zero in place of a bug would be trained on."""

    exit_code = LASTING_EXIT


class UnscoredError(RewardError):
    """One sample cannot be scored; the worker may score others."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one response."""

    total: float
    components: Mapping[str, float] = {}
    """Parts of the score and further measures, for people to read. Only `total` is optimized."""


class Reward(Protocol):
    """Judges responses, many at a time."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Return the score of one response. `tokens` are all that follow the prompt, of earlier turns and the
        environment too, as the policy sampled and read them.

        It is computed without blocking the event loop, and never NaN. Raises UnscoredError if this sample is to be
        given up, RewardError if the worker is to end.
        """
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...


@runtime_checkable
class ReadsTruths(Protocol):
    """A reward that can say, before a response is there, which prompts it will not be able to judge."""

    async def complaints(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return for each prompt what its row lacks or has that the reward cannot read; "" where it can judge it."""
        ...


class RewardFunction(Protocol):
    """A user's own reward by an import path, in verl's signature; it may be a coroutine function. The names of the
    parameters are part of it."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> float | dict[str, float]:
        """Return the score of the response `solution_str`: a finite number, or a mapping with `score` and further
        measures, for people to read. The other arguments are the fields of the prompt's row."""
        ...
