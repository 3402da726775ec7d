"""The leases that a worker holds. It renews them while it works, drops lost ones and hands the rest back at the end."""

import asyncio
import logging

import msgspec

from headway.broker.client.leases import Leases
from headway.broker.client.status import HeartbeatReply, StatusVerbs
from headway.broker.schema import Lease
from headway.broker.schema.status import WorkerInfo

from .segments import SegmentLog

log = logging.getLogger(__name__)


class _Held(msgspec.Struct, eq=False):
    lease: Lease
    segments: SegmentLog
    task: asyncio.Task[None]
    is_generating: bool = True


class HeldLeases:
    """The leases by token: a worker may lease a lost sample anew while the sample's old task still ends."""

    def __init__(self, leases: Leases, ttl_s: float) -> None:
        self._leases = leases
        self._ttl_s = ttl_s
        self._held: dict[str, _Held] = {}
        self.lost = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generating(self) -> int:
        """Leases whose samples the engine still generates; the others are being scored or submitted."""
        return sum(held.is_generating for held in self._held.values())

    def hold(self, lease: Lease, segments: SegmentLog, task: asyncio.Task[None]) -> None:
        """Add a lease. `task` generates, scores and submits its sample."""
        self._held[lease.token] = _Held(lease, segments, task)

    def mark_generated(self, lease: Lease) -> None:
        """Note that the sample is generated: a drain waits for it from now on instead of cancelling it."""
        if held := self._held.get(lease.token):
            held.is_generating = False

    def forget(self, lease: Lease) -> None:
        """Drop a lease whose submission has ended, whatever its outcome."""
        self._held.pop(lease.token, None)

    def lose(self, lease: Lease) -> None:
        """Stop generating a sample whose lease another worker has. A finished sample learns it when it is submitted."""
        held = self._held.get(lease.token)
        if held is not None and held.is_generating:
            log.info("lease of %s was lost; its generation is cancelled", lease.tid)
            self.lost += 1
            held.task.cancel()
            self.forget(lease)

    async def report(self, status: StatusVerbs, info: WorkerInfo, alive_s: float) -> HeartbeatReply:
        """Report that the worker is alive for `alive_s` and renew all leases, in one call, and stop generating the
        samples of lost ones. Returns the answer."""
        asked = [held.lease for held in self._held.values()]
        heard = await status.heartbeat(info, alive_s, asked, self._ttl_s)
        self._leases.forget_lost(asked, heard.lost)
        for lease in asked:
            if lease.token in heard.lost:
                self.lose(lease)
        return heard

    async def hand_back(self, lease: Lease) -> None:
        """Append the newest tokens of a sample whose generation has ended, and release it, so that a worker can
        continue it."""
        if held := self._held.get(lease.token):
            await held.segments.append_rest()
            await self._release([held])

    async def hand_back_unfinished(self) -> None:
        """Cancel the samples that are being generated, append their newest tokens and release them, so that another
        worker can continue them at once."""
        await self._hand_back([held for held in self._held.values() if held.is_generating])

    async def hand_back_unsubmitted(self) -> None:
        """Do the same with the samples that are generated, and not scored or submitted yet: another worker scores
        them without sampling a token."""
        await self._hand_back(list(self._held.values()))

    async def _hand_back(self, unfinished: list[_Held]) -> None:
        if not unfinished:
            return
        for held in unfinished:
            held.task.cancel()
        await asyncio.wait([held.task for held in unfinished])
        await asyncio.gather(*(held.segments.append_rest() for held in unfinished))
        await self._release(unfinished)

    def cancel_all(self) -> None:
        """Cancel every task, also those that score or submit. The leases stay held."""
        for held in self._held.values():
            held.task.cancel()

    async def hand_back_all(self) -> None:
        """Cancel every task and release every lease."""
        self.cancel_all()
        await self._release(list(self._held.values()))

    async def wait_submitted(self, timeout_s: float) -> None:
        """Wait until every finished sample is submitted, or `timeout_s` seconds have passed."""
        if tasks := [held.task for held in self._held.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _release(self, unfinished: list[_Held]) -> None:
        if not unfinished:
            return
        await self._leases.release([held.lease for held in unfinished])
        for held in unfinished:
            self.forget(held.lease)
