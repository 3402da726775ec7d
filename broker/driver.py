"""The driver's connections, without what its pipelines cost: hiredis packs the commands, replies come as they are.

Packing in Python and looking at every reply takes the driver longer than all the rest of a round trip.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

Argument = str | bytes | int | float
Command = tuple[Argument, ...]


class _PacksInC(AbstractConnection):
    def pack_command(self, *args: Any) -> list[bytes]:
        if " " in args[0]:  # two words, as the driver's own greetings have
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
    """Connections to one server, made when they are needed. Raises ValueError for a URL that is none."""
    pool = redis.BlockingConnectionPool.from_url(url, **options)
    pool.connection_class = _PACKING[pool.connection_class]
    return pool


async def exchange(pool: redis.ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    """The replies in order, refusals as exceptions among them. Raises what kept the server from answering.

    A connection that was left between two replies, for whatever reason, is closed.
    """
    connection: Any = await pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _reply(connection) for _ in commands]
    finally:
        await pool.release(connection)


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)  # the caller has a deadline for all of them
    except ResponseError as refusal:
        return refusal
