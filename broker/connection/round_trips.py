"""Verbs that run at the same time share round trips to one server.

A round trip of its own costs a verb several times as much work as its command.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from redis.asyncio import ConnectionPool

from .driver import Command, exchange
from .sharing import SharedCalls

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
