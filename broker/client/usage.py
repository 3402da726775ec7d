"""The processes that use a run, the bytes that it holds on its server, and for how long no process has used it.

A learner renews a heartbeat while it trains a run, and a process that would take the run away reads it first. Asking
does not count as use.
"""

import asyncio
import getpass
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headway.broker.connection.connection import Connection, pairs
from headway.broker.errors import BrokerError, FrameError
from headway.broker.schema import WeightVersion
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.wire.codec import decode


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

    async def look(self) -> RunUsage | None:
        """Returns the line, or None where no learner has claimed the run yet."""
        reply = await self._connection.look("usage", absent=None)
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
            announced=_announced(meta),
            last_step=_step_metrics(steps[0]) if steps else None,
            workers=int(workers),
            payload_bytes=int(meta.get("payload_bytes", 0)),
            idle_s=int(idle_s),
        )


def _announced(meta: dict[str, str]) -> WeightVersion | None:
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
