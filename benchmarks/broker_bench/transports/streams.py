"""A stream and a consumer group, as a user would build it by hand: the same frames, read 64 at a time, acknowledged.

Headway's protocol is compared with this: nothing is deleted, no worker holds a sample, nothing bounds its age, and a
learner that dies has lost the samples that it had acknowledged.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis

from headway.broker.wire.codec import decode_trajectory, encode_trajectory

from .base import BATCH, PRODUCERS, Consume, Produce, Receipt, Task, in_coroutines

STREAM, GROUP = "trajectories", "learner"


class Streams:
    """Every coroutine sends its own XADD and waits for the reply."""

    promise = "stored by the server (as durable as its AOF); delivered to a consumer group, acknowledged after decoding"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        async with connect(task.url) as client:
            await client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
            yield lambda: self._read(client, task)

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        async with connect(task.url) as client:

            async def send(number: int) -> None:
                await client.xadd(STREAM, {"frame": encode_trajectory(task.payloads[number])})

            yield lambda: in_coroutines(range(task.count), send)

    async def _read(self, client: Any, task: Task) -> Receipt:
        receipt = Receipt()
        while len(receipt.numbers) < task.count:
            for _, entries in await client.xreadgroup(GROUP, "learner", {STREAM: ">"}, count=BATCH, block=1000):
                for _, fields in entries:
                    receipt.note(decode_trajectory(fields[b"frame"]))
                await client.xack(STREAM, GROUP, *(entry for entry, _ in entries))
        return receipt


class PipelinedStreams(Streams):
    """The XADDs that came up while the last pipeline was under way go out together in the next: the faster way."""

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        async with connect(task.url) as client:
            pipeline = _SharedPipeline(client)

            async def send(number: int) -> None:
                await pipeline.xadd(encode_trajectory(task.payloads[number]))

            yield lambda: in_coroutines(range(task.count), send)


class _SharedPipeline:
    """One round trip at a time, for all waiting coroutines."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def xadd(self, frame: bytes) -> None:
        """Add the entry; return once the server has it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((frame, done))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await done

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting, []
            async with self._client.pipeline(transaction=False) as pipe:
                for frame, _ in sent:
                    pipe.xadd(STREAM, {"frame": frame})
                await pipe.execute()
            for _, done in sent:
                done.set_result(None)


def connect(url: str) -> Any:
    """Open a client with a connection for every coroutine."""
    pool = redis.BlockingConnectionPool.from_url(url, max_connections=PRODUCERS + 1, timeout=60)
    return redis.Redis.from_pool(pool)
