"""The compared ways of moving trajectories: handed over in one process, and back as arrays in another.

`Streams` is what a user would build by hand: nothing is deleted, no worker holds a sample, nothing bounds its age, and
a learner that dies has lost the samples that it had acknowledged. Headway runs the protocol of a real run, whose
prompts are fed before the lap begins, because the other transports carry none.
"""

import asyncio
import logging
import os
import pickle
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import redis as blocking_redis
import redis.asyncio as redis
from numpy.typing import NDArray

from headway.broker import open_broker
from headway.broker.schema import Trajectory
from headway.broker.wire.codec import decode_trajectory, encode_trajectory

from .load import BATCH, GROUP_SIZE, Learner, Payloads, Run, Worker, number_of, payloads_of

RUN_NAME = "race"
STREAM, GROUP = "trajectories", "learner"
_OBJECT_STORE_BYTES = 2 << 30
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "benchmark"}
_TOKEN = secrets.token_hex(32)
"""The token of the clusters that this process starts: Ray reads it once."""
PRODUCERS = 64
"""Coroutines that each hand over one trajectory at a time."""


@dataclass(frozen=True)
class Task:
    """One lap: `count` trajectories with frames of `frame_bytes`, through the server or address `url`."""

    url: str
    count: int
    frame_bytes: int
    lap: int
    """The lap's number among those of the same two processes."""

    @property
    def payloads(self) -> Payloads:
        return payloads_of(self.frame_bytes)


@dataclass
class Receipt:
    """The numbers of the trajectories that arrived."""

    numbers: list[int] = field(default_factory=list)
    tokens: int = 0

    def note(self, trajectory: Trajectory) -> None:
        self.note_arrays(number_of(trajectory.tid), trajectory.response_tokens, trajectory.behavior_logprobs)

    def note_arrays(self, number: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        assert tokens.dtype == np.int32
        assert logprobs.dtype == np.float32
        self.numbers.append(number)
        self.tokens += len(tokens)

    def check(self, task: Task) -> None:
        """Raises AssertionError unless each arrived exactly once."""
        assert sorted(self.numbers) == list(range(task.count)), f"{len(self.numbers)} of {task.count} trajectories"
        variants = [len(variant.response_tokens) for variant in task.payloads.variants]
        assert self.tokens == sum(variants[number % len(variants)] for number in range(task.count))


Produce = Callable[[], Awaitable[None]]
Consume = Callable[[], Awaitable[Receipt]]


class Transport(Protocol):
    """One way of moving trajectories. The consumer's end is opened first; an opened end is ready to go."""

    promise: str
    """The guarantee for a trajectory that counts as handed over, and as received."""

    def consumer(self, task: Task) -> AbstractAsyncContextManager[Consume]:
        """Receive until all of the task's trajectories are there."""

    def producer(self, task: Task) -> AbstractAsyncContextManager[Produce]:
        """Hand all of the task's trajectories over."""


async def in_coroutines(numbers: Iterable[int], send: Callable[[int], Awaitable[None]]) -> None:
    """Send all of them, each coroutine its next one when its last was handed over."""
    waiting = iter(numbers)

    async def one_after_the_other() -> None:
        for number in waiting:
            await send(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PRODUCERS):
            tasks.create_task(one_after_the_other())


class Headway:
    """Samples leased one by one, submitted whole."""

    promise = (
        "leased and fenced, stored and counted by the server (as durable as its AOF), taken in pinned steps of bounded "
        "lag, decoded, committed and freed; trained at most once whichever process crashes"
    )

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        broker = await open_broker(task.url, RUN_NAME)
        try:
            learner = await Learner.begin(broker, Run(groups=task.count // GROUP_SIZE))
            yield lambda: _train(learner)
        finally:
            await broker.close()

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        broker = await open_broker(task.url, RUN_NAME)
        worker = Worker(broker, task.payloads, capacity=PRODUCERS)
        try:
            yield lambda: worker.work(task.count)
        finally:
            await broker.close()


async def _train(learner: Learner) -> Receipt:
    receipt = Receipt()
    async for batch in learner.steps():
        for group in batch.groups:
            for trajectory in group.trajectories:
                receipt.note(trajectory)
    return receipt


class Streams:
    """A stream and a consumer group.

    The XADDs that came up while the last pipeline was under way go out together in the next: the faster way.
    """

    promise = "stored by the server (as durable as its AOF); delivered to a consumer group, acknowledged after decoding"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        async with connect(task.url) as client:
            await client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
            yield lambda: self._read(client, task)

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        async with connect(task.url) as client:
            pipeline = _SharedPipeline(client)

            async def send(number: int) -> None:
                await pipeline.xadd(encode_trajectory(task.payloads[number]))

            yield lambda: in_coroutines(range(task.count), send)

    async def _read(self, client: Any, task: Task) -> Receipt:
        receipt = Receipt()
        while len(receipt.numbers) < task.count:
            for _, entries in await client.xreadgroup(GROUP, "learner", {STREAM: ">"}, count=BATCH, block=1000):
                for _, fields in entries:
                    receipt.note(decode_trajectory(fields[b"frame"]))
                await client.xack(STREAM, GROUP, *(entry for entry, _ in entries))
        return receipt


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


class OneByOne:
    """XADD of one pickle, XREAD COUNT 1: with arrays inside, which is the kinder case."""

    promise = (
        "stored by the server (as durable as its AOF); no acknowledgement, read from a position that one remembers"
    )

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        # The reader has nothing else to do: the blocking client is the faster one.
        with blocking_redis.Redis.from_url(task.url) as client:

            async def read() -> Receipt:
                return self._read(client, task)

            yield read

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        async with connect(task.url) as client:

            async def send(number: int) -> None:
                data = pickle.dumps(task.payloads[number])
                await client.xadd(STREAM, {"index": number, "data": data}, maxlen=1_000_000, approximate=True)

            yield lambda: in_coroutines(range(task.count), send)

    def _read(self, client: Any, task: Task) -> Receipt:
        receipt, last = Receipt(), b"0"
        while len(receipt.numbers) < task.count:
            for _, entries in client.xread({STREAM: last}, count=1, block=100):
                for last, fields in entries:  # noqa: B007 - read on from here
                    receipt.note(pickle.loads(fields[b"data"]))
        return receipt


class ZeroMQ:
    """A bounded queue in both processes' memory, nothing in between. Its blocking sockets are the faster ones."""

    promise = "in a queue in memory; lost if either process ends; no acknowledgement"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(task.url)

            async def read() -> Receipt:
                receipt = Receipt()
                while len(receipt.numbers) < task.count:
                    receipt.note(decode_trajectory(socket.recv()))
                return receipt

            yield read

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(task.url)

            async def send(number: int) -> None:
                socket.send(encode_trajectory(task.payloads[number]))

            yield lambda: in_coroutines(range(task.count), send)


class RayQueue:
    """Every coroutine puts one trajectory; the reader has as many gets under way as others read at once."""

    promise = "in the queue actor's memory; lost with the actor or its node; no acknowledgement"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        queue, receipt = _queue(task), Receipt()

        async def get(_: int) -> None:
            receipt.note(await queue.get_async())

        async def read() -> Receipt:
            await in_coroutines(range(task.count), get)
            return receipt

        yield read

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        queue = _queue(task)

        async def send(number: int) -> None:
            await queue.put_async(task.payloads[number])

        yield lambda: in_coroutines(range(task.count), send)


def _queue(task: Task) -> Any:
    """Return the same actor for both ends. It ends with the cluster: the producer may still await its last reply."""
    import ray
    from ray.util.queue import Queue

    if not ray.is_initialized():
        ray.init(address=task.url, **_QUIET)
    queue = Queue(actor_options={"name": f"queue-{task.lap}", "get_if_exists": True, "num_cpus": 0})
    queue.qsize()  # once it answers, its process runs
    return queue


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Start a cluster of this machine alone, and yield its address. Processes started meanwhile may join it."""
    root = str(Path(__file__).parents[2])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),  # for its workers
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
    }
    os.environ.update(environment)
    import ray  # reads its environment when it is imported

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **_QUIET)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "headway": Headway,
    "streams": Streams,
    "xread_one": OneByOne,
    "zeromq": ZeroMQ,
    "ray_queue": RayQueue,
}
NEEDS = {"zeromq": "zmq", "ray_queue": "ray"}
"""The packages that a transport needs beyond Headway's own; the others are on a server."""


def is_installed(name: str) -> bool:
    """Whether all that the transport needs is installed."""
    return name not in NEEDS or find_spec(NEEDS[name]) is not None
