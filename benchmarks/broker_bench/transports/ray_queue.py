"""ray.util.queue: an actor that holds objects, which Ray serializes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ray.util.queue import Queue

from .base import Consume, Produce, Receipt, Task, in_coroutines
from .ray_cluster import join


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


def _queue(task: Task) -> Queue:
    """Return the same actor for both ends. It ends with the cluster: the producer may still await its last reply."""
    join(task.url)
    queue = Queue(actor_options={"name": f"queue-{task.lap}", "get_if_exists": True, "num_cpus": 0})
    queue.qsize()  # once it answers, its process runs
    return queue
