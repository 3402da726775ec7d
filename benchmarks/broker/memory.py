"""Memory of server and client while a million prompts go through the broker; it should stay flat.

Every prompt is a group of one tiny sample: fed a few steps ahead, leased, submitted, taken, committed, its name
forgotten below the watermark.
"""

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import redis
import uvloop

from benchmarks.command import tell
from headway.broker import open_broker
from headway.broker.server.embedded import EmbeddedServer

from .load import BATCH, SHORT_PROMPT, Learner, Run, Worker, cpu_seconds, fresh_server, payloads_of

FRAME_BYTES = 200
FEED_AHEAD_STEPS = 4
FLAT_WITHIN = 0.1
FIGURES = ("server_used_bytes", "server_rss_bytes", "client_rss_bytes", "keys")
Look = dict[str, float]


def measure(prompts: int, every: int) -> dict[str, Any]:
    """Return trends over all looks but the first, before which not everything has been used once."""
    with fresh_server("everysec") as server:
        looks = uvloop.run(_flow(server, prompts, every))
    settled = looks[1:] or looks
    return {
        "prompts": looks[-1]["trained"],
        "wall_s": round(looks[-1]["wall_s"] - looks[0]["wall_s"]),
        "per_cpu_second": [
            round((after["trained"] - before["trained"]) / (after["cpu_s"] - before["cpu_s"]))
            for before, after in pairwise(looks)
        ],
        **{name: _trend(settled, name) for name in FIGURES},
    }


async def _flow(server: EmbeddedServer, prompts: int, every: int) -> list[Look]:
    broker = await open_broker(server.url, "memory")
    run = Run(
        groups=prompts // BATCH * BATCH, group_size=1, prompt_tokens=SHORT_PROMPT, feed_ahead_steps=FEED_AHEAD_STEPS
    )
    looks, trained = list[Look](), 0
    try:
        learner = await Learner.begin(broker, run)
        working = asyncio.create_task(Worker(broker, payloads_of(FRAME_BYTES, SHORT_PROMPT)).work(run.groups))
        async for batch in learner.steps():
            trained += sum(len(group.trajectories) for group in batch.groups)
            if trained % every < BATCH or trained == run.groups:
                looks.append(_look(server, trained))
                tell(json.dumps(looks[-1]))
        await working
    finally:
        await broker.close()
    return looks


def _look(server: EmbeddedServer, trained: int) -> Look:
    with redis.Redis.from_url(server.url) as client:
        used, keys = client.info("memory")["used_memory"], client.dbsize()
    return {
        "trained": trained,
        "wall_s": time.monotonic(),
        "cpu_s": time.process_time() + cpu_seconds(server.pid),
        "server_used_bytes": used,
        "server_rss_bytes": psutil.Process(server.pid).memory_info().rss,
        "client_rss_bytes": psutil.Process().memory_info().rss,
        "keys": keys,
    }


def _trend(looks: list[Look], name: str) -> dict[str, Any]:
    """Return the trend of a figure.

    It is flat where the line through all looks gains over the whole run only a small share of its beginning.
    """
    trained, values = (np.array([one[key] for one in looks], float) for key in ("trained", name))
    slope = float(np.polyfit(trained, values, 1)[0]) if len(looks) > 1 else 0.0
    return {
        "first": int(values[0]),
        "last": int(values[-1]),
        "highest": int(values.max()),
        "slope_per_prompt": round(slope, 3),
        "flat": bool(slope * (trained[-1] - trained[0]) <= FLAT_WITHIN * values[0]),
    }
