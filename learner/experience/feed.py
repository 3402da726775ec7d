"""The learner feeds prompts to the broker before workers may begin them."""

import time

from headway.broker import BlockingBroker
from headway.broker.owner import Owner
from headway.broker.schema import Prompt
from headway.learner.data.prompts.cursor import PromptCursor

DRAW_S = 1.0
"""Seconds after which the learner draws no further prompt before it feeds those that it has: a slow source must not
keep workers from the first of them, nor the learner from batches that are ready."""


class PromptFeed:
    """Keeps `wanted` prompts in the pool: admission runs max_lag + 1 steps ahead of training.

    It draws prompts in the caller's thread and not on the client's event loop, where a slow source would hold up all
    other calls of the learner.
    """

    def __init__(self, blocking: BlockingBroker, owner: Owner, cursor: PromptCursor, wanted: int) -> None:
        self._call = blocking.call
        self._prompts = blocking.broker.prompts
        self._owner = owner
        self._cursor = cursor
        self._wanted = wanted
        self._first = wanted
        """The prompts from the cursor's place on that are fed however many are in the pool: those of a branch that was
        abandoned may lie there, and workers begin the oldest first."""
        self._next: list[Prompt] = []
        """The cursor gave these prompts and the broker has not confirmed them yet: an outage must not lose them."""
        self._is_closed = False
        self._fed_in_vain_to = ""

    def keep_ahead(self) -> None:
        """Feeds the prompts that are missing, or those of them that `DRAW_S` leaves time for, and closes the feed after
        the last one. Idempotent."""
        ahead, has_lost = self._call(self._prompts.waiting())
        self._feed_lost(has_lost)
        missing = self._wanted - ahead if ahead < self._wanted // 2 else 0
        if not self._next and (count := max(missing, self._first)):
            self._draw(count)
        if self._next:
            self._call(self._prompts.feed(self._next, self._owner))
            self._first = max(0, self._first - len(self._next))
            self._next = []
        if self._cursor.is_exhausted and not self._is_closed:
            self._call(self._prompts.close_feed(self._owner))
            self._is_closed = True

    def begin_again(self) -> None:
        """Feeds again from the checkpoint's cursor, as the server has forgotten some prompts."""
        self._cursor.feed_again()
        self._is_closed = False

    def _draw(self, count: int) -> None:
        """Takes prompts from the cursor: at least one, if there is one left, and no more than `count`."""
        until = time.monotonic() + DRAW_S
        while len(self._next) < count and not self._cursor.is_exhausted:
            self._next += self._cursor.next(1)
            if time.monotonic() > until:
                return

    def _feed_lost(self, has_lost: bool) -> None:
        """Feeds again the prompts that the server has lost. Where that brings nothing back, a resumed learner's cursor
        has not drawn the lost ones yet, and the next try waits until the cursor has moved."""
        if not has_lost:
            self._fed_in_vain_to = ""
        elif self._fed_in_vain_to != self._cursor.position:
            brought_back = self._call(self._prompts.feed(self._cursor.fed_before(), self._owner))
            self._fed_in_vain_to = "" if brought_back else self._cursor.position
