"""verl's TransferQueue: a controller that knows who produced and consumed each sample, and storage, as Ray actors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.broker_bench.payloads import number_of
from headway.broker.schema import Trajectory

from .base import BATCH, Consume, Produce, Receipt, Task, in_coroutines
from .ray_cluster import join

_READER = "learner"
_FIELDS = ["number", "prompt", "tokens", "logprobs", "mask", "reward"]
_POLL_S = 0.002


class TransferQueue:
    """Every coroutine puts one sample; the reader takes up to a batch of ready samples and clears it."""

    promise = "in the storage units' memory, marked as consumed once read; lost with the actors"

    @asynccontextmanager
    async def consumer(self, task: Task) -> AsyncIterator[Consume]:
        client = _client(task)
        yield lambda: self._read(client, task)

    @asynccontextmanager
    async def producer(self, task: Task) -> AsyncIterator[Produce]:
        _client(task)

        async def send(number: int) -> None:
            await transfer_queue.async_kv_batch_put([str(number)], _partition(task), _row(task.payloads[number]))

        yield lambda: in_coroutines(range(task.count), send)

    async def _read(self, client: Any, task: Task) -> Receipt:
        receipt, wanted = Receipt(), BATCH
        while (left := task.count - len(receipt.numbers)) > 0:
            wanted = min(wanted, left)
            found = await client.async_get_meta(_FIELDS, wanted, _partition(task), task_name=_READER)
            if found.size == 0:  # fewer samples are ready: the queue gives all or nothing
                await asyncio.sleep(_POLL_S)
                continue
            _note(receipt, await client.async_get_data(found))
            await client.async_clear_samples(found)
        return receipt


def _client(task: Task) -> Any:
    """Return this process's client. The first process starts the actors, which end with the cluster."""
    join(task.url)
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    return transfer_queue.get_client()


def _partition(task: Task) -> str:
    """Return the lap's own partition, as verl has one for every training step."""
    return f"lap-{task.lap}"


def _row(trajectory: Trajectory) -> TensorDict:
    columns = {
        "number": np.array([number_of(trajectory.tid)]),
        "prompt": trajectory.prompt_tokens,
        "tokens": trajectory.response_tokens,
        "logprobs": trajectory.behavior_logprobs,
        "mask": trajectory.loss_mask,
        "reward": np.array([trajectory.reward], np.float32),
    }
    return TensorDict({name: torch.from_numpy(array)[None] for name, array in columns.items()}, batch_size=[1])


def _note(receipt: Receipt, batch: TensorDict) -> None:
    for number, tokens, logprobs in zip(
        *(batch[name].unbind() for name in ("number", "tokens", "logprobs")), strict=True
    ):
        receipt.note_arrays(int(number), tokens.numpy(), logprobs.numpy())
