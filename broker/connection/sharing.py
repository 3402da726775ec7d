"""Items that arrive while others are under way share the next call: a few large calls replace many small ones."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Request(Generic[Item, Result]):
    item: Item
    result: "asyncio.Future[Result]"


class SharedCalls(Generic[Item, Result]):
    """Hands items, in the order in which they came, to `carry_out`, which returns their results in that order.

    At most `at_a_time` calls of it are under way, each with at most `most` items and about `most_size`, the first of
    them whatever its size. Items whose caller was cancelled may be carried out nevertheless.
    """

    def __init__(
        self,
        carry_out: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        at_a_time: float,
        most: int,
        size: Callable[[Item], int] = lambda _: 0,
        most_size: float = math.inf,
    ) -> None:
        self._carry_out = carry_out
        self._at_a_time = at_a_time
        self._most = most
        self._size = size
        self._most_size = most_size
        self._waiting = deque[_Request[Item, Result]]()
        self._carriers = set[asyncio.Task[None]]()
        self._carrying = 0

    async def send(self, item: Item) -> Result:
        """Returns the item's result. Raises the error that `carry_out` raised for the item or, while it was waiting,
        for others."""
        request: _Request[Item, Result] = _Request(item, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._carrying < self._at_a_time:
            self._carrying += 1
            self._start(self._carry())
        return await request.result

    async def close(self) -> None:
        """Cancels the items that callers still wait for."""
        _cancel(self._take(len(self._waiting)))
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    def _start(self, carrying: Coroutine[Any, Any, None]) -> None:
        """Runs `carry_out` in a task of its own: before Python 3.12 the driver, inside `asyncio.wait_for`, can swallow
        its caller's cancellation."""
        carrier = asyncio.get_running_loop().create_task(carrying)
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def _carry(self) -> None:
        try:
            while requests := self._take(self._most, self._most_size):
                await self._carry_together(requests)
        finally:
            self._carrying -= 1  # no await since `_take` found nothing

    async def _carry_together(self, requests: Sequence[_Request[Item, Result]]) -> None:
        try:
            results = await self._carry_out([request.item for request in requests])
        except asyncio.CancelledError:
            _cancel(requests)
            raise
        except Exception as error:  # noqa: BLE001 - it is raised in the callers
            # Waiting items get the error, too: their callers try again until their own deadlines.
            _fail([*requests, *self._take(len(self._waiting))], error)
        else:
            for request, result in zip(requests, results, strict=True):
                if not request.result.done():
                    request.result.set_result(result)

    def _take(self, count: int, size: float = math.inf) -> list[_Request[Item, Result]]:
        """Takes the next items that a caller still waits for."""
        taken = list[_Request[Item, Result]]()
        while self._waiting and len(taken) < count and size > 0:
            request = self._waiting.popleft()
            if not request.result.done():
                taken.append(request)
                size -= self._size(request.item)
        return taken


def _fail(requests: Sequence[_Request[Any, Any]], error: Exception) -> None:
    for request in requests:
        if not request.result.done():
            request.result.set_exception(error)


def _cancel(requests: Sequence[_Request[Any, Any]]) -> None:
    for request in requests:
        request.result.cancel()
