"""Pools of workers: a supervisor reports how many workers it runs, and users with the learner's password say how many
it should run.

    headway scale ──scale──► wanted ◄──report── supervisor ──starts, drains──► workers

A pool has one supervisor at a time. The number of workers wanted is kept by the server while the supervisor lives, so
it outlives a learner that is restarted, and a new supervisor begins with the number of its own recipe or option.
"""

from typing import Literal

from headway.broker.connection.connection import Connection
from headway.broker.errors import BrokerError
from headway.broker.keys import check_pool_name
from headway.broker.schema.processes import PoolInfo
from headway.broker.wire.codec import encode

MOST_WORKERS = 4096
"""The most workers of one pool."""


class Pools:
    """The workers that each pool runs, and the number that it should run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def report(self, info: PoolInfo, count: int, ttl_s: float) -> int | None:
        """Reports a pool for `ttl_s` seconds, and returns the number of workers wanted.

        `count`: the number that the pool begins with. None: no learner has claimed the run yet, so nothing was
        reported. Raises BrokerError where another supervisor has the name, ForeignRunError as every verb does.
        """
        said = (check_pool_name(info.pool), self._connection.session, int(1000 * ttl_s), encode(info))
        reply = await self._connection.script("pool", *said, count, info.restarts, absent=None)
        if reply is None:
            return None
        if reply[0] == 0:
            raise BrokerError(
                f"Another supervisor runs a pool {info.pool!r} of run {self._connection.run}. Give this one another"
                " name (--pool NAME), or stop the other one."
            )
        return int(reply[1])

    async def scale(self, pool: str, manner: Literal["to", "by"], workers: int) -> tuple[int, int] | None:
        """Asks the pool's supervisor for so many workers, or so many more; returns those wanted before and now.

        None: no living supervisor has such a pool. The result is cut to 0 at least and MOST_WORKERS at most. Needs the
        learner's user.
        """
        reply = await self._connection.script("scale", check_pool_name(pool), manner, workers, absent=[])
        return (int(reply[0]), int(reply[1])) if reply else None
