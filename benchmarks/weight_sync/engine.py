"""An engine that generates all the while and takes every version as a worker does: received, swapped in, proved.

    python -m benchmarks.weight_sync.engine URL RUN ORDER

Prints a line of JSON for every version, with moments of the machine's monotonic clock.
"""

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.broker.client.broker import Broker, Outages, open_broker
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine, GenerationRequest
from headway.rollout_workers.weight_updates.engine_turns import SwapTurns
from headway.rollout_workers.weight_updates.engine_weights import EngineWeights
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import Delivery, StreamedDelivery
from headway.weightsync.subscriber import Subscriber

from . import REST_S, Order

HEARTBEAT_S = 0.2
PROMPT = list(range(3, 19))


class Clock:
    """The times at which tokens arrived, by version."""

    def __init__(self) -> None:
        self.first: dict[WeightVersion, float] = {}
        self.last: dict[WeightVersion, float] = {}

    def note(self, version: WeightVersion) -> None:
        now = time.monotonic()
        self.first.setdefault(version, now)
        self.last[version] = now


async def follow(url: str, run: str, order: Order) -> None:
    broker = await open_broker(url, run)
    config = EngineConfig(
        kind=order.engine,
        max_concurrent=order.requests,
        max_model_len=len(PROMPT) + order.new_tokens + 1,
        dtype=order.dtype,  # type: ignore[arg-type]
        options=order.options,
    )
    engine = open_engine(config, Path(order.model), seed=0)
    gc.collect()
    gc.freeze()  # as a worker does
    weights = WeightsConfig(staging=order.staging, broadcast_timeout_s=order.timeout_s)  # type: ignore[arg-type]
    subscriber = _Noting(broker, "engine", weights)
    outages, clock = Outages(broker.url), Clock()
    verified: dict[WeightVersion | None, float] = {}
    turns = SwapTurns(broker.swap_turns, "engine", outages, share=1.0, ttl_s=5.0)
    swapping = _Swapping(engine)
    held = EngineWeights(
        cast(Engine, swapping),
        subscriber,
        outages,
        turns,
        keep_cache=order.kv_policy == "keep",
        verify=True,
        on_swap=lambda: verified.update({held.version: time.monotonic()}),
    )
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(held.follow()), tasks.create_task(_beat(broker, subscriber, held))]
        await held.reach(None)
        background += [tasks.create_task(_generate(engine, order, number, clock)) for number in range(order.requests)]
        first = await held.reach(None)
        for number in range(first.step, order.versions):
            version = WeightVersion(first.incarnation, number)
            await held.reach(version)
            while version not in clock.first:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            before = max((at for other, at in clock.last.items() if other < version), default=verified[version])
            await asyncio.sleep(REST_S / 2)
            line = {
                "version": version.step,
                "received": subscriber.at.get(version),
                "swapped": swapping.at[version],
                "last_old_token": before,
                "first_new_token": clock.first[version],
                "verified": verified[version],
            }
            print(json.dumps(line), flush=True)
        for task in background:
            task.cancel()
    await subscriber.close()
    await engine.close()
    await broker.close()


class _Swapping:
    """The engine as a swap sees it: it notes the ends of swaps, of which each must prove the weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.at: dict[WeightVersion, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def swap_weights(self, version: WeightVersion, *arguments: Any, check: Any, **options: Any) -> None:
        await self._engine.swap_weights(version, *arguments, check=check, **options)
        self.at[version] = time.monotonic()


class _Noting(Subscriber):
    """A subscriber that notes when a version had arrived."""

    def __init__(self, broker: Broker, worker: str, config: WeightsConfig) -> None:
        super().__init__(broker, worker, config)
        self.at: dict[WeightVersion, float] = {}

    async def wait_for_version(self, current: WeightVersion | None) -> Delivery | StreamedDelivery:
        delivery = await super().wait_for_version(current)
        self.at[delivery.manifest.version] = time.monotonic()
        return delivery


async def _generate(engine: Engine, order: Order, number: int, clock: Clock) -> None:
    for count in itertools.count():
        request = GenerationRequest(
            request_id=f"{number}-{count}",
            prompt_tokens=PROMPT,
            max_new_tokens=order.new_tokens,
            temperature=1.0,
            stop_token_ids=[],
        )
        async for chunk in engine.generate(request):
            if chunk.token_ids:
                clock.note(chunk.version)


async def _beat(broker: Broker, subscriber: Subscriber, held: EngineWeights) -> None:
    while True:
        info: dict[str, Any] = {
            "worker": "engine",
            "host": "here",
            "pid": os.getpid(),
            "engine": "measured",
            "state": "generating",
            "version": held.version,
            "broadcast_epoch": subscriber.epoch,
            "wants_broadcast": True,
            "capacity": 1,
            "active": 1,
            "generated_tokens": 0,
            "submitted": 0,
            "tokens_per_s": 0.0,
            "swaps": held.swaps,
            "last_error": held.last_error or subscriber.last_error,
        }
        await broker.status.heartbeat(WorkerInfo(**info), 20.0)
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Order)))
