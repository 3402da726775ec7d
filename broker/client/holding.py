"""A learner says again and again that it trains a run, and a process that would take the run away asks first."""

import asyncio
import getpass
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headway.broker.connection.connection import Connection
from headway.broker.errors import BrokerError

TTL_S = 30.0
"""A learner counts as gone so long after its last word."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A learner's process."""

    host: str
    pid: int
    user: str
    since: float
    """When the learner began, in seconds since 1970 by the clock of its host."""

    @classmethod
    def this_process(cls) -> "Holder":
        """Returns this process as the holder from now on."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # containers may have users without a name
            user = f"{os.getuid()}"
        return cls(host=socket.gethostname(), pid=os.getpid(), user=user, since=time.time())


@dataclass(frozen=True)
class Use:
    """The learner and the workers that use a run."""

    holder: Holder | None
    """None where no learner has said anything for `TTL_S`."""
    workers: tuple[str, ...]
    """The names of the live workers."""
    state: str
    """The state of the run; "absent" where no learner has ever claimed it."""


class Holding:
    """A learner's sign of life on the run. It decides nothing: what fences a learner is its owner's token."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._key = connection.keys("holder")
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self, holder: Holder) -> None:
        """Makes the run this holder's until `end` or the end of the process."""
        await self.end()
        said = msgspec.json.encode(holder)
        await self._say(said)
        self._renewing = asyncio.create_task(self._renew(said))

    async def end(self) -> None:
        """Frees the run at once, unless another learner holds it now."""
        if self._renewing is None:
            return
        renewing, self._renewing = self._renewing, None
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing

    async def use(self) -> Use:
        """Returns the learner and the workers that use the run now."""
        said = await self._connection.execute("GET", self._key)
        state, *_ = await self._connection.script("glance", absent=[None])
        workers = await self._connection.script("workers", absent=[])
        return Use(
            holder=_read(said),
            workers=tuple(name.decode(errors="replace") for name in workers[::2]),
            state=state.decode(errors="replace") if state else "absent",
        )

    async def _say(self, said: bytes) -> None:
        await self._connection.execute("SET", self._key, said, "PX", int(1000 * TTL_S))

    async def _renew(self, said: bytes) -> None:
        try:
            while True:
                await asyncio.sleep(TTL_S / 3)
                with suppress(BrokerError):  # it is away; the next word may reach it
                    await self._say(said)
        finally:
            with suppress(BrokerError):
                if await self._connection.execute("GET", self._key) == said:
                    await self._connection.execute("UNLINK", self._key)


def _read(said: bytes | None) -> Holder | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(said or b"", type=Holder)
    return None
