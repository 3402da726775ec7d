"""Headway itself, with the protocol of a real run: bounded lag, an announced version and a commit for every step.

Prompts are fed before the lap begins, because the other transports carry none.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.broker_bench.learner import Learner, Run
from benchmarks.broker_bench.payloads import GROUP_SIZE
from benchmarks.broker_bench.worker import Worker
from headway.broker import open_broker

from .base import PRODUCERS, Consume, Produce, Receipt, Task

RUN = "race"
_SEGMENTS = 4


class Headway:
    """Samples leased one by one, submitted whole."""

    promise = (
        "leased and fenced, stored and counted by the server (as durable as its AOF), taken in pinned steps of bounded "
        "lag, decoded, committed and freed; trained at most once whichever process crashes"
    )
    segments = 0

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        broker = await open_broker(task.url, RUN)
        try:
            learner = await Learner.begin(broker, Run(groups=task.count // GROUP_SIZE))
            yield lambda: _train(learner)
        finally:
            await broker.close()

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        broker = await open_broker(task.url, RUN)
        worker = Worker(broker, task.payloads, capacity=PRODUCERS, segments=self.segments)
        try:
            yield lambda: worker.work(task.count)
        finally:
            await broker.close()


class HeadwayInSegments(Headway):
    """The same, with every quarter of the response made durable before the next."""

    promise = Headway.promise + "; what a dead worker had generated goes on elsewhere"
    segments = _SEGMENTS


async def _train(learner: Learner) -> Receipt:
    receipt = Receipt()
    async for batch in learner.steps():
        for group in batch.groups:
            for trajectory in group.trajectories:
                receipt.note(trajectory)
    return receipt
