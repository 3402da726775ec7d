"""The seam between a worker and the functions that score responses, and what follows when one of them fails: after a
call that failed for good the worker gives the sample up, or ends.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headway.broker.errors import LASTING_EXIT, HeadwayError, UserCodeError
from headway.broker.schema import Prompt

log = logging.getLogger(__name__)


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
class GroundTruthReader(Protocol):
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


UNSCORED_IN_A_ROW = 3
"""Samples in a row that a function may fail to score before the function counts as broken."""


class DroppedMeasures:
    """Tells and counts measures of one function that are not finite, such as that of a judge that did not answer."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._samples = 0

    def note(self, parts: dict[str, float], names: Sequence[str]) -> dict[str, float]:
        """Return a sample's measures, with the number of those that were left out of them, if any."""
        if not names:
            return parts
        self._samples += 1
        if math.log10(self._samples).is_integer():
            log.warning(
                "%s: its measure %s is NaN or infinite, and left out of the metrics; so it was for %d samples so far",
                self._of,
                ", ".join(names)[:200],
                self._samples,
            )
        return {**parts, "left_out": float(len(names))}


class CallFailures:
    """Counts the failed calls of one function."""

    def __init__(self, of: str, remedy: str, deadline_s: float, *, failure: str = "failed twice") -> None:
        """`of`: the users' name of the function; `remedy`: what it must do; `failure`: how its calls fail."""
        self._of = of
        self._failure = failure
        self._remedy = remedy
        self._deadline_s = deadline_s
        self._in_a_row = 0
        self._worked_at: float | None = None
        """The time of its last answer; None if it has never answered."""

    def note_success(self) -> None:
        """Note that the function has answered a call."""
        self._in_a_row, self._worked_at = 0, time.monotonic()

    def note(self, prompt: Prompt, error: HeadwayError) -> RewardError:
        """Return the error to raise for a failed call: UnscoredError, or RewardError if the function fails again and
        again."""
        self._in_a_row += 1
        said = f"it {error}" if isinstance(error, UserCodeError) else str(error).removesuffix(".")
        message = f"{self._of} {self._failure} on prompt {prompt.group!r} ({prompt.text[:80]!r}): {said}."
        if not self._has_failed():
            return UnscoredError(f"{message} The sample is handed back, because a 0 in its place would be trained on.")
        return RewardError(
            f"{message} So it did on {self._in_a_row} samples in a row: the worker ends, because a 0 in their place"
            f" would be trained on. {self._remedy}"
        )

    def _has_failed(self) -> bool:
        """Whether the function counts as broken. One that has worked may have met a few responses that it cannot take,
        or a judge that is away for a while."""
        if self._in_a_row < UNSCORED_IN_A_ROW:
            return False
        return self._worked_at is None or time.monotonic() - self._worked_at > self._deadline_s
