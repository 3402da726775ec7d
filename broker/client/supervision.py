"""Who works on a run: pools of workers and their supervisors, the faults of workers, and the run's users.

    headway scale ──scale──► wanted ◄──report── supervisor ──starts, drains──► workers

A pool has one supervisor at a time. The number of workers wanted is kept by the server while the supervisor lives, so
it outlives a learner that is restarted, and a new supervisor begins with the number of its own recipe or option.

Faults name each worker that is set aside, with the rule that it broke and the figures. A worker of another version of
Headway cannot call the run's functions, so a fault is JSON under a plain key, in one of sixteen places, of which the
oldest is written over. Any process with a worker's password can write any fault: people read them, and no decision
rests on them.

A learner renews a heartbeat while it trains a run, and a process that would take the run away reads it first. `Usage`
tells which processes use a run, how much it holds, and for how long no process has used it; asking is no use.
"""

import asyncio
import getpass
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec
from redis.exceptions import NoPermissionError

from headway.broker.connection.connection import Connection, pairs
from headway.broker.errors import BrokerError, FrameError
from headway.broker.keys import check_name, is_name
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import Fault, PoolInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.wire.codec import decode, encode

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
        said = (check_name(info.pool, "pool"), self._connection.session, int(1000 * ttl_s), encode(info))
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
        reply = await self._connection.script("scale", check_name(pool, "pool"), manner, workers, absent=[])
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


@dataclass(frozen=True)
class RunUsage:
    """A line about a run."""

    run: str
    state: str
    incarnation: int
    announced: WeightVersion | None
    last_step: StepMetrics | None
    """The last step; None before the first, and where another schema version wrote it."""
    workers: int
    """The number of live workers."""
    payload_bytes: int
    idle_s: int
    """The time since its learner, a worker or a status display last used it. Before Redis 7.2 asking is use, too."""


class Usage:
    """Reads how much a run holds, and how many processes use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self) -> RunUsage | None:
        """Returns the line, or None where no learner has claimed the run yet."""
        reply = await self._connection.untouched_script("usage", absent=None)
        if reply is None:
            return None
        idle_s, flat, steps, workers = reply
        meta = dict(pairs(flat))
        if "state" not in meta:
            return None
        return RunUsage(
            run=self._connection.run,
            state=meta["state"],
            incarnation=int(meta["incarnation"]),
            announced=announced_version(meta),
            last_step=_step_metrics(steps[0]) if steps else None,
            workers=int(workers),
            payload_bytes=int(meta.get("payload_bytes", 0)),
            idle_s=int(idle_s),
        )


def announced_version(meta: Mapping[str, str]) -> WeightVersion | None:
    """Returns the newest announced version of a run with these fields of `meta`, if there is any."""
    if "announced_step" not in meta:
        return None
    return WeightVersion(int(meta["announced_incarnation"]), int(meta["announced_step"]))


def _step_metrics(frame: bytes) -> StepMetrics | None:
    try:
        return decode(frame, StepMetrics)
    except FrameError:
        return None


HEARTBEAT_TTL_S = 30.0
"""A learner counts as gone so long after its last heartbeat."""


class LearnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's process."""

    host: str
    pid: int
    user: str
    since: float
    """When the learner began, in seconds since 1970 by the clock of its host."""

    @classmethod
    def this_process(cls) -> "LearnerInfo":
        """Returns this process as a learner that begins now."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # containers may have users without a name
            user = f"{os.getuid()}"
        return cls(host=socket.gethostname(), pid=os.getpid(), user=user, since=time.time())


@dataclass(frozen=True)
class RunUsers:
    """The learner and the workers that use a run."""

    learner: LearnerInfo | None
    """None where no learner has sent a heartbeat for `HEARTBEAT_TTL_S`."""
    workers: tuple[str, ...]
    """The names of the live workers."""
    state: str
    """The state of the run; "absent" where no learner has ever claimed it."""


class LearnerHeartbeat:
    """A learner's heartbeat on the run. It decides nothing: what fences a learner is its owner's token."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._key = connection.keys("holder")
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self, holder: LearnerInfo) -> None:
        """Marks the run as this learner's until `end` or the end of the process."""
        await self.end()
        said = msgspec.json.encode(holder)
        await self._say(said)
        self._renewing = asyncio.create_task(self._renew(said))

    async def end(self) -> None:
        """Frees the run at once, unless another learner has marked it since."""
        if self._renewing is None:
            return
        renewing, self._renewing = self._renewing, None
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing

    async def users(self) -> RunUsers:
        """Returns the learner and the workers that use the run now."""
        said = await self._connection.execute("GET", self._key)
        state, *_ = await self._connection.script("peek", absent=[None])
        workers = await self._connection.script("workers", absent=[])
        return RunUsers(
            learner=_decoded(said),
            workers=tuple(name.decode(errors="replace") for name in workers[::2]),
            state=state.decode(errors="replace") if state else "absent",
        )

    async def _say(self, said: bytes) -> None:
        await self._connection.execute("SET", self._key, said, "PX", int(1000 * HEARTBEAT_TTL_S))

    async def _renew(self, said: bytes) -> None:
        try:
            while True:
                await asyncio.sleep(HEARTBEAT_TTL_S / 3)
                with suppress(BrokerError):  # it is away; the next word may reach it
                    await self._say(said)
        finally:
            with suppress(BrokerError):
                if await self._connection.execute("GET", self._key) == said:
                    await self._connection.execute("UNLINK", self._key)


def _decoded(said: bytes | None) -> LearnerInfo | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(said or b"", type=LearnerInfo)
    return None
