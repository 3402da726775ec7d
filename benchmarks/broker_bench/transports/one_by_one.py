"""A stream of pickles, read one entry at a time, as in other training systems that use Redis."""

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import redis as blocking_redis

from benchmarks.broker_bench.payloads import number_of
from headway.broker.schema import Trajectory

from .base import Consume, Produce, Receipt, Task, in_coroutines
from .streams import STREAM, connect

_KEPT = 1_000_000


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
                data = pickle.dumps(self.to_object(task.payloads[number]))
                await client.xadd(STREAM, {"index": number, "data": data}, maxlen=_KEPT, approximate=True)

            yield lambda: in_coroutines(range(task.count), send)

    def to_object(self, trajectory: Trajectory) -> Any:
        return trajectory

    def note(self, receipt: Receipt, value: Any) -> None:
        receipt.note(value)

    def _read(self, client: Any, task: Task) -> Receipt:
        receipt, last = Receipt(), b"0"
        while len(receipt.numbers) < task.count:
            for _, entries in client.xread({STREAM: last}, count=1, block=100):
                for last, fields in entries:  # noqa: B007 - read on from here
                    self.note(receipt, pickle.loads(fields[b"data"]))
        return receipt


class OneByOneLists(OneByOne):
    """The same with lists of numbers inside, as dumped from a model class, which systems in the field send."""

    def to_object(self, trajectory: Trajectory) -> Any:
        return as_lists(trajectory)

    def note(self, receipt: Receipt, value: Any) -> None:
        for name, kind in (("prompt", np.int32), ("labels", np.uint8)):
            np.array(value[name], kind)
        tokens, logprobs = np.array(value["input_ids"], np.int32), np.array(value["logprobs"], np.float32)
        receipt.note_arrays(value["number"], tokens, logprobs)


def as_lists(trajectory: Trajectory) -> dict[str, Any]:
    """Return numbers as a model class holds them."""
    return {
        "number": number_of(trajectory.tid),
        "prompt": trajectory.prompt_tokens.tolist(),
        "input_ids": trajectory.response_tokens.tolist(),
        "logprobs": trajectory.behavior_logprobs.tolist(),
        "labels": trajectory.loss_mask.tolist(),
        "reward": trajectory.reward,
        "finished": trajectory.finish_reason,
    }
