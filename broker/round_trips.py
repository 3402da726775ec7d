"""Verbs that run at the same time share round trips to one server: what arrives while others are under way goes out
together.

A round trip of its own costs a verb several times the work that its command is.
"""

import asyncio
import math
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool

from .driver import Command, exchange

_CARRIERS = 4
"""Round trips at a time: while the server works on one, the next is prepared, and a large one holds up few others."""
_SHARED_BY = 16
"""Most requests in one round trip; with more, server and client wait for each other."""
_SHARED_BYTES = 1 << 18
"""About the most that they carry together: on a slow network large ones must not share one deadline."""


@dataclass(frozen=True, eq=False)
class _Request:
    commands: Sequence[Command]
    replies: asyncio.Future[list[Any]]

    @property
    def size(self) -> int:
        """Bytes, where there are many."""
        return sum(len(part) for command in self.commands for part in command if isinstance(part, bytes))


class RoundTrips:
    """Carries requests to one server. Those whose caller was cancelled may be carried out nevertheless."""

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._waiting = deque[_Request]()
        self._carriers = set[asyncio.Task[None]]()
        self._carrying = 0
        self._alone = set[asyncio.Task[None]]()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, refusals as exceptions among them; commands of one request are carried out in order.

        Raises what kept the server from answering.
        """
        request = _Request(commands, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._carrying < _CARRIERS:
            self._carrying += 1
            self._start(self._carry(), self._carriers)
        return await request.replies

    async def send_alone(self, commands: Sequence[Command]) -> list[Any]:
        """As `send`, but on a connection of its own: whatever the commands wait for holds up nobody else."""
        request = _Request(commands, asyncio.get_running_loop().create_future())
        self._start(self._exchange([request]), self._alone)
        return await request.replies

    async def close(self) -> None:
        """Whoever still waits is cancelled."""
        self._cancel(self._take(len(self._waiting)))
        tasks = [*self._carriers, *self._alone]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """In a task of its own: before Python 3.12 the driver, inside `asyncio.wait_for`, can swallow its caller's
        cancellation."""
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _carry(self) -> None:
        try:
            while requests := self._take(_SHARED_BY, _SHARED_BYTES):
                await self._exchange(requests)
        finally:
            self._carrying -= 1  # in the same turn in which nothing was found: whoever comes next starts another one

    async def _exchange(self, requests: Sequence[_Request]) -> None:
        try:
            commands = [command for request in requests for command in request.commands]
            replies = await exchange(self._pool, commands, self._timeout_s)
        except asyncio.CancelledError:
            self._cancel(requests)
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            # Those whose turn has not come learn it, too: each has a deadline of its own to try again.
            self._fail([*requests, *self._take(len(self._waiting))], error)
        else:
            self._hand_out(requests, replies)

    def _take(self, count: int, size: float = math.inf) -> list[_Request]:
        """The next ones that somebody still waits for, the first of them whatever its size."""
        taken = list[_Request]()
        while self._waiting and len(taken) < count and size > 0:
            request = self._waiting.popleft()
            if not request.replies.done():
                taken.append(request)
                size -= request.size
        return taken

    def _hand_out(self, requests: Sequence[_Request], replies: Sequence[Any]) -> None:
        first = 0
        for request in requests:
            end = first + len(request.commands)
            if not request.replies.done():
                request.replies.set_result(list(replies[first:end]))
            first = end

    def _fail(self, requests: Sequence[_Request], error: Exception) -> None:
        for request in requests:
            if not request.replies.done():
                request.replies.set_exception(error)

    def _cancel(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            request.replies.cancel()
