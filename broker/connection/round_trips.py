"""Verbs that run at the same time share round trips to one server.

A round trip of its own costs a verb several times as much work as its command. Items that arrive while others are under
way share the next call (`SharedCalls`). hiredis packs the commands, and replies are passed on unchanged: to pack in
Python and look at every reply takes the driver longer than all the rest of a round trip.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import hiredis
import redis.asyncio as redis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

_COPIED_BYTES = 16 << 10
"""Larger blobs are sent unpacked, as packing would copy them."""

Argument = str | bytes | int | float
Command = tuple[Argument, ...]


class _PacksInC(AbstractConnection):
    def pack_command(self, *args: Any) -> list[bytes]:
        stored = args[2] if len(args) > 2 else b""  # by SET
        if (isinstance(stored, bytes) and len(stored) > _COPIED_BYTES) or " " in args[
            0
        ]:  # two words, as the driver's own greetings have
            return super().pack_command(*args)
        return [hiredis.pack_command(args)]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [packed for command in commands for packed in self.pack_command(*command)]


class _Connection(_PacksInC, redis.Connection):
    pass


class _SSLConnection(_PacksInC, redis.SSLConnection):
    pass


class _UnixDomainSocketConnection(_PacksInC, redis.UnixDomainSocketConnection):
    pass


_PACKING: dict[type[AbstractConnection], type[AbstractConnection]] = {
    redis.Connection: _Connection,
    redis.SSLConnection: _SSLConnection,
    redis.UnixDomainSocketConnection: _UnixDomainSocketConnection,
}


def open_pool(url: str, **options: Any) -> redis.BlockingConnectionPool:
    """Returns a pool of connections to one server, made when they are needed. Raises ValueError for an invalid URL."""
    pool = redis.BlockingConnectionPool.from_url(url, **options)
    pool.connection_class = _PACKING[pool.connection_class]
    return pool


async def exchange(pool: redis.ConnectionPool, commands: Sequence[Command], timeout_s: float) -> list[Any]:
    """Sends the commands and returns the replies in order, with refusals among them as exceptions. Raises the error
    that kept the server from answering, and TimeoutError where no reply has come for `timeout_s`.

    A connection on which replies are still missing, for any reason, is closed.
    """
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(timeout_s) as limit:
        connection: Any = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            replies, renewed = list[Any](), clock()
            for _ in commands:
                try:
                    replies.append(await connection.read_response(timeout=math.inf))  # `limit` is the deadline
                except ResponseError as refusal:
                    replies.append(refusal)
                if clock() - renewed > timeout_s / 10:  # moving it costs more than reading a reply
                    renewed = clock()
                    limit.reschedule(renewed + timeout_s)
            return replies
        finally:
            await pool.release(connection)


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


_AT_A_TIME = 4
"""Round trips under way: while the server works on one, the client prepares the next, and a large one holds up few."""
_SHARED_BY = 16
"""Most requests in one round trip; with more, server and client wait for each other."""
_SHARED_BYTES = 1 << 20
"""About the most bytes in one round trip: on a slow network large requests must not share one deadline."""

Commands = Sequence[Command]
Limit = Callable[[], AbstractAsyncContextManager[object]]


class RoundTrips:
    """Carries requests to one server. A request whose caller was cancelled may be carried out nevertheless."""

    def __init__(self, pool: ConnectionPool, timeout_s: float, limit: Limit) -> None:
        """`limit` is entered for each `send`, which it may end with TimeoutError."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._limit = limit
        self._shared = SharedCalls(
            self._exchange, at_a_time=_AT_A_TIME, most=_SHARED_BY, size=_bytes_of, most_size=_SHARED_BYTES
        )
        self._alone = SharedCalls(self._exchange, at_a_time=math.inf, most=1)

    async def send(self, commands: Commands) -> list[Any]:
        """Returns the replies, with refusals among them as exceptions. Commands of one request are carried out in
        order.

        Raises the error that kept the server from answering.
        """
        async with self._limit():
            return await self._shared.send(commands)

    async def send_alone(self, commands: Commands) -> list[Any]:
        """Sends as `send` does, but on a connection of its own, so that commands that wait delay no other caller."""
        return await self._alone.send(commands)

    async def close(self) -> None:
        """Cancels the commands that callers still wait for."""
        await self._shared.close()
        await self._alone.close()
        await self._pool.aclose()

    async def _exchange(self, requests: Sequence[Commands]) -> list[list[Any]]:
        commands = [command for request in requests for command in request]
        replies = iter(await exchange(self._pool, commands, self._timeout_s))
        return [[next(replies) for _ in request] for request in requests]


def _bytes_of(commands: Commands) -> int:
    """Returns the bytes of the commands; a rough size is enough unless there are many."""
    return sum(len(part) for command in commands for part in command if isinstance(part, bytes))
