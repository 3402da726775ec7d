"""The leases that a worker holds: renewed during work, dropped when lost, handed back at the end."""

import asyncio
import logging

import msgspec

from broker.leases import Leases
from broker.schema import Lease

log = logging.getLogger(__name__)


class _Held(msgspec.Struct, eq=False):
    lease: Lease
    task: asyncio.Task[None]
    is_generating: bool = True


class HeldLeases:
    """Keyed by the lease's token: a lost sample may be leased anew while its old task still ends."""

    def __init__(self, leases: Leases, ttl_s: float) -> None:
        self._leases = leases
        self._ttl_s = ttl_s
        self._held: dict[str, _Held] = {}
        self.lost = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease, task: asyncio.Task[None]) -> None:
        """`task` generates, scores and submits the sample."""
        self._held[lease.token] = _Held(lease, task)

    def mark_generated(self, lease: Lease) -> None:
        """From now on a drain waits for the sample instead of cancelling it."""
        if held := self._held.get(lease.token):
            held.is_generating = False

    def forget(self, lease: Lease) -> None:
        """Submitted, in whatever way that ended."""
        self._held.pop(lease.token, None)

    async def renew(self) -> None:
        """Renew all; stop generating those that were lost. Submitting will tell about a finished sample."""
        asked = list(self._held.values())
        if not asked:
            return
        gone = await self._leases.renew([held.lease for held in asked], self._ttl_s)
        for held in asked:
            if held.lease.tid in gone and held.is_generating and held.lease.token in self._held:
                log.info("lease of %s was lost; its generation is cancelled", held.lease.tid)
                self.lost += 1
                held.task.cancel()
                self.forget(held.lease)

    async def hand_back_unfinished(self) -> None:
        """Cancel what is still generating and release it, so that another worker can begin it at once."""
        unfinished = [held for held in self._held.values() if held.is_generating]
        for held in unfinished:
            held.task.cancel()
        await self._release(unfinished)

    def cancel_all(self) -> None:
        """Give up what is still being scored or submitted, too; its leases are still held."""
        for held in self._held.values():
            held.task.cancel()

    async def hand_back_all(self) -> None:
        """Give up and release whatever is left."""
        self.cancel_all()
        await self._release(list(self._held.values()))

    async def wait_submitted(self, timeout_s: float) -> None:
        """Until no finished sample is left, or the time is up."""
        if tasks := [held.task for held in self._held.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _release(self, unfinished: list[_Held]) -> None:
        if not unfinished:
            return
        await self._leases.release([held.lease for held in unfinished])
        for held in unfinished:
            self.forget(held.lease)
