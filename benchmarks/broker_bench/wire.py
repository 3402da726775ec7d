"""Bytes per trajectory: in arrays, pickled, in Headway's frame, and in all messages of the protocol."""

import asyncio
import pickle
from collections.abc import Iterable
from typing import Any

import redis
import uvloop

from headway.broker import open_broker
from headway.broker.schema import Trajectory

from .learner import BATCH, Learner, Run
from .payloads import GROUP_SIZE, payloads_of
from .servers import fresh_server
from .transports.one_by_one import as_lists
from .worker import Worker

_COUNT = 4 * BATCH
_WAYS = {"whole": 0, "in_4_segments": 4}


def measure(sizes: Iterable[int]) -> list[dict[str, Any]]:
    return [_sizes(frame_bytes) for frame_bytes in sizes]


def _sizes(frame_bytes: int) -> dict[str, Any]:
    one = payloads_of(frame_bytes)[0]
    return {
        "response_tokens": len(one.response_tokens),
        "raw_arrays": _raw_bytes(one),
        "pickled_arrays": len(pickle.dumps(one)),
        "pickled_lists": len(pickle.dumps(as_lists(one))),
        "frame": round(payloads_of(frame_bytes).frame_bytes),
        "all_verbs": {way: _travel(frame_bytes, segments) for way, segments in _WAYS.items()},
    }


def _raw_bytes(trajectory: Trajectory) -> int:
    return sum(
        array.nbytes
        for array in (
            trajectory.prompt_tokens,
            trajectory.response_tokens,
            trajectory.behavior_logprobs,
            trajectory.loss_mask,
        )
    )


def _travel(frame_bytes: int, segments: int) -> dict[str, int]:
    """Return bytes per trajectory as the server counts them: feed, lease, append, submit, take, announce, commit."""
    with fresh_server("off") as server, redis.Redis.from_url(server.url) as client:
        before = client.info("stats")
        uvloop.run(_run(server.url, frame_bytes, segments))
        after = client.info("stats")
    return {
        f"{way}_server": round((after[name] - before[name]) / _COUNT)
        for way, name in (("to", "total_net_input_bytes"), ("from", "total_net_output_bytes"))
    }


async def _run(url: str, frame_bytes: int, segments: int) -> None:
    broker = await open_broker(url, "wire")
    try:
        learner = await Learner.begin(broker, Run(groups=_COUNT // GROUP_SIZE))
        worker = Worker(broker, payloads_of(frame_bytes), segments=segments)
        await asyncio.gather(learner.train(), worker.work(_COUNT))
    finally:
        await broker.close()
