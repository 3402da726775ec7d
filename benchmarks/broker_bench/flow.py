"""A long run of small trajectories, worker and learner in one process, looked at every so often."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import redis

from headway.broker import open_broker
from headway.broker.server.embedded import EmbeddedServer

from .learner import BATCH, Learner, Run
from .payloads import SHORT_PROMPT, Payloads
from .servers import cpu_seconds
from .worker import Worker

_FEED_AHEAD_STEPS = 4


@dataclass(frozen=True)
class Look:
    """The costs so far and the memory in use after `trained` trajectories."""

    trained: int
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float
    server_used_bytes: int
    server_rss_bytes: int
    client_rss_bytes: int
    keys: int


async def flow(
    server: EmbeddedServer, payloads: Payloads, count: int, group_size: int, every: int, note: Callable[[Look], None]
) -> None:
    """Feed, lease, submit, take and commit `count` trajectories; prompts are fed a few steps ahead."""
    broker = await open_broker(server.url, "flow")
    run = Run(
        groups=count // BATCH * BATCH // group_size,
        group_size=group_size,
        prompt_tokens=SHORT_PROMPT,
        feed_ahead_steps=_FEED_AHEAD_STEPS,
    )
    try:
        learner = await Learner.begin(broker, run)
        working = asyncio.create_task(Worker(broker, payloads).work(run.groups * group_size))
        trained = 0
        async for batch in learner.steps():
            trained += sum(len(group.trajectories) for group in batch.groups)
            if trained % every < BATCH or trained == run.groups * group_size:
                note(look(server, trained))
        await working
    finally:
        await broker.close()


def look(server: EmbeddedServer, trained: int) -> Look:
    with redis.Redis.from_url(server.url) as client:
        used, keys = client.info("memory")["used_memory"], client.dbsize()
    return Look(
        trained=trained,
        wall_s=time.monotonic(),
        client_cpu_s=time.process_time(),
        server_cpu_s=cpu_seconds(server.pid),
        server_used_bytes=used,
        server_rss_bytes=psutil.Process(server.pid).memory_info().rss,
        client_rss_bytes=psutil.Process().memory_info().rss,
        keys=keys,
    )
