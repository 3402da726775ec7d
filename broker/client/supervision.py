"""Pools of workers: a supervisor reports how many workers it runs, and users with the learner's password say how many
it should run.

    headway scale ──scale──► wanted ◄──report── supervisor ──starts, drains──► workers

A pool has one supervisor at a time. The number of workers wanted is kept by the server while the supervisor lives, so
it outlives a learner that is restarted, and a new supervisor begins with the number of its own recipe or option.

Faults name each worker that is set aside, with the rule that it broke and the figures. A worker of another version of
Headway cannot call the run's functions, so a fault is JSON under a plain key, in one of sixteen places, of which the
oldest is written over. Any process with a worker's password can write any fault: people read them, and no decision
rests on them.
"""

import logging
import time
from contextlib import suppress
from typing import Literal

import msgspec
from redis.exceptions import NoPermissionError

from headway.broker.connection.connection import Connection
from headway.broker.errors import BrokerError
from headway.broker.keys import check_pool_name, is_name
from headway.broker.schema.status import Fault, PoolInfo
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


PLACES = "0123456789abcdef"
KEPT_S = 3600
_MOST_BYTES = 8000
_LATEST_S = float(1 << 33)
"""Beyond the year 2200; a display could not write much later times."""
_HOST_CHARACTERS, _REASON_CHARACTERS = 100, 800

log = logging.getLogger(__name__)


class Faults:
    """The faults of a run's workers in the last hour."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def report(self, *, worker: str, host: str, rule: str, reason: str) -> None:
        """Names a worker that is set aside. Does nothing, but for a line in the log, where the server does not take
        it."""
        shown = reason[:_REASON_CHARACTERS].encode(errors="backslashreplace").decode()
        fault = Fault(worker=worker, host=host[:_HOST_CHARACTERS], rule=rule, reason=shown, at=time.time())
        try:
            place = _place_for(worker, await _held(self._connection))
            key = self._connection.keys(f"fault:{place}")
            await self._connection.execute("SET", key, msgspec.json.encode(fault), "EX", KEPT_S)
        except BrokerError as error:
            log.warning("Others cannot be told of it: %s", error)


async def read_faults(connection: Connection) -> tuple[Fault, ...]:
    """Returns the faults, the oldest first; none where this user may not read them."""
    try:
        held = await _held(connection)
    except BrokerError as error:
        if isinstance(error.__cause__, NoPermissionError):
            return ()
        raise
    return tuple(sorted((fault for fault in held.values() if fault is not None), key=lambda fault: fault.at))


async def _held(connection: Connection) -> dict[str, Fault | None]:
    """Returns the fault in each place, or None where there is none that can be read."""
    asked = [("GETRANGE", connection.keys(f"fault:{place}"), 0, _MOST_BYTES) for place in PLACES]
    return dict(zip(PLACES, map(_read, await connection.pipeline(asked)), strict=True))


def _read(said: bytes) -> Fault | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fault = msgspec.json.decode(said, type=Fault)
        if is_name(fault.worker) and 0 <= fault.at < _LATEST_S:
            return fault
    return None


def _place_for(worker: str, held: dict[str, Fault | None]) -> str:
    """Returns the place of an earlier fault of this worker, else an empty one, else that of the oldest."""

    def rank(place: str) -> tuple[bool, float]:
        fault = held[place]
        return fault is None or fault.worker != worker, 0.0 if fault is None else fault.at

    return min(PLACES, key=rank)
