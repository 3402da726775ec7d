"""Calls of user code that failed for good: whether it is the sample that is given up, or the worker that ends."""

import time

from broker.errors import UserCodeError
from broker.schema import Prompt

from .base import RewardError, UnscoredError

UNSCORED_IN_A_ROW = 3
"""Samples of a worker that a function could not score, before it is the function that is at fault."""


class Failures:
    """Of one function's calls."""

    def __init__(self, of: str, remedy: str, deadline_s: float) -> None:
        """`of`: what users call the function; `remedy`: what it must do."""
        self._of = of
        self._remedy = remedy
        self._deadline_s = deadline_s
        self._in_a_row = 0
        self._worked_at: float | None = None
        """The last time that it answered; None: it never has."""

    def note_success(self) -> None:
        """It has answered a call."""
        self._in_a_row, self._worked_at = 0, time.monotonic()

    def note(self, prompt: Prompt, error: UserCodeError) -> RewardError:
        """What to raise for a call that failed: UnscoredError, or RewardError where it does so again and again."""
        self._in_a_row += 1
        told = f"{self._of} failed twice on prompt {prompt.group!r} ({prompt.text[:80]!r}): it {error}."
        if not self._has_failed():
            return UnscoredError(f"{told} The sample is handed back, because a 0 in its place would be trained on.")
        return RewardError(
            f"{told} So it did on {self._in_a_row} samples in a row: the worker ends, because a 0 in their place would"
            f" be trained on. {self._remedy}"
        )

    def _has_failed(self) -> bool:
        """One that has worked may have met a few responses that it cannot take, or a judge that is away a while."""
        if self._in_a_row < UNSCORED_IN_A_ROW:
            return False
        return self._worked_at is None or time.monotonic() - self._worked_at > self._deadline_s
