"""The learner feeds prompts to the broker before workers may begin them."""

from broker import BlockingBroker
from broker.owner import Owner
from broker.schema import Prompt
from learner.data.prompts.cursor import PromptCursor


class PromptFeed:
    """Keeps `wanted` prompts in the pool: admission runs max_lag + 1 steps ahead of training."""

    def __init__(self, blocking: BlockingBroker, owner: Owner, cursor: PromptCursor, wanted: int) -> None:
        self._prompts = blocking.broker.prompts
        self._owner = owner
        self._cursor = cursor
        self._wanted = wanted
        self._next: list[Prompt] = []
        """The cursor gave these prompts and the broker has not confirmed them yet: an outage must not lose them."""
        self._is_closed = False
        self._fed_in_vain_to = ""

    async def keep_ahead(self) -> None:
        """Feeds the prompts that are missing, and closes the feed after the last one. Idempotent."""
        ahead, has_lost = await self._prompts.waiting()
        await self._feed_lost(has_lost)
        if not self._next and not self._cursor.is_exhausted and ahead < self._wanted // 2:
            self._next = self._cursor.next(self._wanted - ahead)
        if self._next:
            await self._prompts.feed(self._next, self._owner)
            self._next = []
        if self._cursor.is_exhausted and not self._is_closed:
            await self._prompts.close_feed(self._owner)
            self._is_closed = True

    def begin_again(self) -> None:
        """Feeds again from the checkpoint's cursor, as the server has forgotten some prompts."""
        self._cursor.feed_again()
        self._is_closed = False

    async def _feed_lost(self, has_lost: bool) -> None:
        """Feeds again the prompts that the server has lost. Where that brings nothing back, a resumed learner's cursor
        has not drawn the lost ones yet, and the next try waits until the cursor has moved."""
        if not has_lost:
            self._fed_in_vain_to = ""
        elif self._fed_in_vain_to != self._cursor.position:
            brought_back = await self._prompts.feed(self._cursor.fed_before(), self._owner)
            self._fed_in_vain_to = "" if brought_back else self._cursor.position
