"""The broker's status at the moment of a kill, and the fate of a learner that another one has replaced."""

import asyncio
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Literal

from headway.broker import Broker
from headway.broker.errors import BrokerError
from headway.broker.schema.status import RunStatus

from .trial import RUN

_POLL_S = 0.1


class Witness:
    """Looks past the links, straight at the server."""

    def __init__(self, url: str) -> None:
        self._broker = Broker(url, RUN, timeout_s=0.5)

    async def close(self) -> None:
        await self._broker.close()

    async def status(self) -> RunStatus | None:
        """Return the status, or None while the server does not answer."""
        try:
            return await self._broker.status.snapshot()
        except BrokerError:
            return None

    async def sees_generation(self) -> None:
        """Wait until some sample is leased."""
        while True:
            status = await self.status()
            if status is not None and status.queues.leased:
                return
            await asyncio.sleep(_POLL_S)

    async def is_effective(self, role: str) -> bool:
        """Whether the death of the server or the learner now hits a held lease, an open batch, or weights on their
        way."""
        status = await self.status()
        if status is None:
            return False
        is_pinned = status.queues.pinned > 0
        return is_pinned or (status.queues.leased > 0 if role == "server" else await self._is_publishing())

    async def held_by(self, process: str) -> int:
        """Return the samples or requests that this worker or scorer reports; 0 while the server does not answer."""
        status = await self.status()
        if status is None:
            return 0
        workers = {info.worker: info.active for info in status.workers if status.queues.leased}
        return (workers | {info.process: info.held for info in status.scorers}).get(process, 0)

    async def _is_publishing(self) -> bool:
        try:
            offered, announced = await self._broker.versions.current()
        except BrokerError:
            return False
        return offered != announced


WITHIN_S = 15.0
POLL_S = 0.2


async def fate_of(
    learner: BaseProcess, incarnation: Callable[[], int], witness: Witness, within_s: float = WITHIN_S
) -> Literal["left", "unfenced", "unreplaced"]:
    """Return the fate of a learner that has claimed an incarnation, perhaps replaced by a later one.

    `unfenced`: it still runs though the server has said for `within_s` that a later one has claimed the run.
    `unreplaced`: the server has not said so for as long. The learner's replacement was killed before it could claim the
    run, or the server has lost the claim with its last second: the run is still this learner's.
    """
    replaced_s = alone_s = 0.0
    while learner.exitcode is None:
        status = await witness.status()
        if status is None or not 0 < incarnation() < status.incarnation:
            alone_s += POLL_S
        else:
            replaced_s += POLL_S
        if status is not None and incarnation() == status.incarnation:
            replaced_s = 0.0  # the later claim is lost, or the learner has claimed the run after it
        if replaced_s > within_s:
            return "unfenced"
        if alone_s > within_s:
            return "unreplaced"
        await asyncio.sleep(POLL_S)
    return "left"
