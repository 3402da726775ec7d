"""Judges what user code does wrong: after a call that failed for good the worker gives the sample up, or ends."""

import logging
import math
import time
from collections.abc import Sequence

from headway.broker.errors import HeadwayError, UserCodeError
from headway.broker.schema import Prompt

from .base import RewardError, UnscoredError

log = logging.getLogger(__name__)
UNSCORED_IN_A_ROW = 3
"""Samples in a row that a function may fail to score before the function counts as broken."""


class LeftOut:
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


class Failures:
    """Counts the failed calls of one function."""

    def __init__(self, of: str, remedy: str, deadline_s: float, *, tried: str = "failed twice") -> None:
        """`of`: the users' name of the function; `remedy`: what it must do; `tried`: how its calls failed."""
        self._of = of
        self._tried = tried
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
        told = f"{self._of} {self._tried} on prompt {prompt.group!r} ({prompt.text[:80]!r}): {said}."
        if not self._has_failed():
            return UnscoredError(f"{told} The sample is handed back, because a 0 in its place would be trained on.")
        return RewardError(
            f"{told} So it did on {self._in_a_row} samples in a row: the worker ends, because a 0 in their place would"
            f" be trained on. {self._remedy}"
        )

    def _has_failed(self) -> bool:
        """Whether the function counts as broken. One that has worked may have met a few responses that it cannot take,
        or a judge that is away for a while."""
        if self._in_a_row < UNSCORED_IN_A_ROW:
            return False
        return self._worked_at is None or time.monotonic() - self._worked_at > self._deadline_s
