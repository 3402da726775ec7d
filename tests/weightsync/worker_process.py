"""A worker without an engine, in a process of its own, which reports every version that it got."""

import asyncio
import contextlib
import os
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from headway.broker import open_broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import WeightManifest
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import Delivery, StreamedDelivery
from headway.weightsync.subscriber import Subscriber
from tests.weightsync.interruptions import Interruptions, interrupt_receiving

HEARTBEAT_S = 0.1
HEARTBEAT_TTL_S = 20.0
"""A time to live so long that a stopped worker counts as alive, which is the hard case."""


def worker_info(worker: str, version: WeightVersion | None, epoch: int, joins_groups: bool = True) -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        host="here",
        pid=os.getpid(),
        engine="none",
        state="idle",
        version=version,
        broadcast_epoch=epoch,
        wants_broadcast=joins_groups,
        capacity=1,
        active=0,
        generated_tokens=0,
        submitted=0,
        tokens_per_s=0.0,
        swaps=0,
    )


def fingerprint(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Return names, types, shapes and exact sums, which the test also computes from the published tensors."""
    return " ".join(f"{name}:{t.dtype}:{tuple(t.shape)}:{t.cpu().double().sum().item()!r}" for name, t in tensors)


class Held(NamedTuple):
    """A version that an engine would have made from parts."""

    manifest: WeightManifest
    tensors: list[tuple[str, torch.Tensor]]


async def received(arriving: StreamedDelivery, held: Delivery | Held | None) -> tuple[Delivery | Held | None, str]:
    """Return (the version that an engine holds afterwards, the reason why it is not the arriving one)."""
    tensors = []
    try:
        async with arriving.taken() as parts:
            async for part in parts:
                tensors += [(name, tensor.clone()) for name, tensor in part]
    except WeightSyncError as error:
        return None if tensors else held, str(error)
    return Held(arriving.manifest, tensors), ""


async def follow(url: str, run: str, worker: str, config: WeightsConfig, connection: Connection) -> None:
    broker = await open_broker(url, run)
    subscriber = Subscriber(broker, worker, config)
    held: Delivery | Held | None = None

    async def beat() -> None:
        while True:
            version = held.manifest.version if held else None
            info = worker_info(worker, version, subscriber.epoch, subscriber.joins_groups)
            await broker.status.heartbeat(info, HEARTBEAT_TTL_S)
            await asyncio.sleep(HEARTBEAT_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(beat())
        while True:
            version = held.manifest.version if held else None
            delivery = await subscriber.wait_for_version(version)
            if isinstance(delivery, StreamedDelivery):
                held, broken = await received(delivery, held)
                if held is None:
                    connection.send({"broken": broken})
                if broken:
                    continue
            else:
                held = delivery
            assert held is not None
            event = {
                "version": [held.manifest.version.incarnation, held.manifest.version.step],
                "fingerprint": fingerprint(held.tensors),
                "last_error": subscriber.last_error,
            }
            connection.send(event)


def follow_run(
    url: str,
    run: str,
    worker: str,
    config: WeightsConfig,
    interruptions: Interruptions,
    environment: dict[str, str],
    connection: Connection,
) -> None:
    """Run the process's whole life."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    interrupt_receiving(interruptions)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow(url, run, worker, config, connection))
