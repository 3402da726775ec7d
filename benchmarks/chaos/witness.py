"""What the broker says at the moment of a kill: did it hit anything?"""

import asyncio

from broker import Broker
from broker.errors import BrokerError
from broker.schema import RunStatus

from .trial import RUN

_POLL_S = 0.1


class Witness:
    """Looks past the links, straight at the server."""

    def __init__(self, url: str) -> None:
        self._broker = Broker(url, RUN, timeout_s=0.5)

    async def close(self) -> None:
        await self._broker.close()

    async def status(self) -> RunStatus | None:
        """None while the server does not say."""
        try:
            return await self._broker.status.snapshot()
        except BrokerError:
            return None

    async def sees_generation(self) -> None:
        """Waits until some sample is leased."""
        while True:
            status = await self.status()
            if status is not None and status.queues.leased:
                return
            await asyncio.sleep(_POLL_S)

    async def is_effective(self, role: str) -> bool:
        """Does the role's death now hit a held lease, a batch not yet committed, or weights on their way?"""
        status = await self.status()
        if status is None:
            return False
        queues = status.queues
        match role:
            case "server":
                return queues.leased > 0 or queues.pinned > 0
            case "learner":
                return queues.pinned > 0 or await self._is_publishing()
        if any(info.process == role and info.held for info in status.scorers):
            return True
        return queues.leased > 0 and any(info.worker == role and info.active for info in status.workers)

    async def _is_publishing(self) -> bool:
        try:
            offered, announced = await self._broker.versions.current()
        except BrokerError:
            return False
        return offered != announced
