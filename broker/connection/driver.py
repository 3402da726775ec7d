"""The driver's connections without the cost of its pipelines: hiredis packs the commands, and replies are passed on
unchanged.

To pack in Python and look at every reply takes the driver longer than all the rest of a round trip.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import redis.asyncio as redis
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
