"""The driver's connections, with commands put on the wire by hiredis.

The driver itself packs commands for coroutines in Python, which takes as long as all the rest of a round trip.
"""

from collections.abc import Iterable
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection


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
