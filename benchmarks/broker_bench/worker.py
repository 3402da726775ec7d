"""The worker's loop without an engine: lease -> append -> submit, as `rollout_workers.worker` asks and waits."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from headway.broker import Broker
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.schema import Lease, Segment, Trajectory, VersionSpan, WeightVersion

from .payloads import Payloads

TTL_S = 30.0
_VERSION_POLL_S = 0.02
_CONFIRM_S = 1.0


class Worker:
    """A worker that asks for as many leases as it has room for, with a task for every sample.

    It awaits `generate` for every sample before it submits it.
    """

    def __init__(
        self,
        broker: Broker,
        payloads: Payloads,
        *,
        name: str = "worker",
        capacity: int = 64,
        segments: int = 0,
        generate: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._broker = broker
        self._payloads = payloads
        self._name = name
        self._capacity = capacity
        self._segments = segments
        self._generate = generate
        self._version = WeightVersion(1, 0)
        self._held = 0
        self.done = 0
        """The number of submitted samples."""
        self._wake = asyncio.Event()

    async def work(self, count: int) -> None:
        """Work until so many samples have been submitted."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._follow_versions()), tasks.create_task(self._confirm())]
            while self.done < count:
                self._wake.clear()
                for lease in await self._lease(min(self._capacity, count - self.done) - self._held):
                    self._held += 1
                    tasks.create_task(self._sample(lease))
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self._held == self._capacity else _VERSION_POLL_S):
                        await self._wake.wait()
            for task in background:
                task.cancel()

    async def _lease(self, room: int) -> Sequence[Lease]:
        if room <= 0:
            return ()
        return (await self._broker.leases.lease(self._name, self._version, room, TTL_S)).leases

    async def _sample(self, lease: Lease) -> None:
        trajectory = sampled_by(self._version, self._payloads.named(lease.tid))
        if self._generate is not None:
            await self._generate()
        for segment in cut(trajectory, self._segments):
            assert (await self._broker.leases.append(lease, segment, TTL_S)).outcome is AppendOutcome.APPENDED
        assert await self._broker.leases.submit(lease, trajectory) is SubmitOutcome.ACCEPTED
        self._held -= 1
        self.done += 1
        self._wake.set()

    async def _follow_versions(self) -> None:
        while True:
            _, announced = await self._broker.versions.current()
            if announced is not None and announced != self._version:
                self._version = announced
                self._wake.set()
            await asyncio.sleep(_VERSION_POLL_S)

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            await self._broker.leases.confirm()


def sampled_by(version: WeightVersion, trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(trajectory, spans=(VersionSpan(0, len(trajectory.response_tokens), version),))


def cut(trajectory: Trajectory, segments: int) -> list[Segment]:
    """Cut the response into at most so many pieces of the same length, in order."""
    tokens, logprobs, version = trajectory.response_tokens, trajectory.behavior_logprobs, trajectory.spans[0].version
    stride = -(-len(tokens) // segments) if segments else 1
    starts = range(0, len(tokens), stride) if segments else ()
    return [
        Segment(
            tid=trajectory.tid,
            index=index,
            start=start,
            tokens=tokens[start : start + stride],
            behavior_logprobs=logprobs[start : start + stride],
            loss_mask=trajectory.loss_mask[start : start + stride],
            spans=(VersionSpan(start, min(start + stride, len(tokens)), version),),
        )
        for index, start in enumerate(starts)
    ]
