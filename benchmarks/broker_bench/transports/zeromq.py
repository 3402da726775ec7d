"""ZeroMQ PUSH to PULL over a unix socket, with the same frames: the cost of moving bytes without remembering any."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq

from headway.broker.wire.codec import decode_trajectory, encode_trajectory

from .base import Consume, Produce, Receipt, Task, in_coroutines


class ZeroMQ:
    """A bounded queue in both processes' memory, nothing in between. Its blocking sockets are the faster ones."""

    promise = "in a queue in memory; lost if either process ends; no acknowledgement"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
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
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(task.url)

            async def send(number: int) -> None:
                socket.send(encode_trajectory(task.payloads[number]))

            yield lambda: in_coroutines(range(task.count), send)
