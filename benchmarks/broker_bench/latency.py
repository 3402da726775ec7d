"""How long a lease, a submission and a take take while a thousand workers share the server.

The workers are coroutines of one process, each with a `Broker` and so with connections of its own, as if it were a
process; the learner is another process. A worker holds one sample at a time and "generates" it in a random time, so
that the load is what so many workers ask for, not all that the server can bear.
"""

import asyncio
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from broker import open_broker
from broker.client.leases import SubmitOutcome
from broker.schema import WeightVersion

from .learner import BATCH, Learner, Run
from .payloads import GROUP_SIZE, payloads_of
from .servers import fresh_server
from .worker import TTL_S, sampled_by

RUN = "latency"
FRAME_BYTES = 10_000
_MAX_LAG = 64
_VERSION_POLL_S = 0.05


def measure(*, workers: int, generate_s: float, samples: int) -> dict[str, Any]:
    """Percentiles in milliseconds over so many samples, with the AOF synced every second."""
    with fresh_server("everysec") as server:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(server.url, theirs, workers, generate_s, samples))
        run = Run(groups=(samples + 3 * workers + 10 * BATCH) // GROUP_SIZE, max_lag=_MAX_LAG)
        takes = uvloop.run(_learn(server.url, run, process, mine))
        leases, submits, wall_s = mine.recv()
        process.join()
    return {
        "workers": workers,
        "mean_generation_s": generate_s,
        "samples_per_s": round(samples / wall_s),
        "frame_bytes": FRAME_BYTES,
        "lease_ms": _percentiles(leases),
        "submit_ms": _percentiles(submits),
        "take_64_and_decode_ms": _percentiles(takes),
    }


async def _learn(url: str, run: Run, process: Any, pipe: Connection) -> list[float]:
    """Trains until the workers have finished."""
    broker = await open_broker(url, RUN)
    try:
        learner = await Learner.begin(broker, run)
        process.start()
        training = asyncio.create_task(learner.train())
        while not (pipe.poll() and learner.take_s):
            if training.done():
                training.result()
            if process.exitcode:
                raise RuntimeError("the workers' process has failed")
            await asyncio.sleep(0.1)
        training.cancel()
        return learner.take_s
    finally:
        await broker.close()


def _work(url: str, pipe: Connection, workers: int, generate_s: float, samples: int) -> None:
    pipe.send(uvloop.run(_crowd(url, workers, generate_s, samples)))


async def _crowd(url: str, workers: int, generate_s: float, samples: int) -> tuple[list[float], list[float], float]:
    """(leases, submissions, all together), in seconds; every worker's first sample does not count."""
    crowd = _Crowd(url, generate_s)
    working = [asyncio.create_task(crowd.follow_versions())]
    working += [asyncio.create_task(crowd.worker(f"w{index}")) for index in range(workers)]
    started = 0.0
    while len(crowd.submit_s) < workers + samples:
        await asyncio.sleep(0.01)
        for task in working:
            if task.done():
                task.result()
        if not started and len(crowd.submit_s) >= workers:
            started = time.perf_counter()
    for task in working:
        task.cancel()
    return crowd.lease_s[workers:], crowd.submit_s[workers:], time.perf_counter() - started


class _Crowd:
    """Workers that share nothing but a clock and the knowledge of the announced version."""

    def __init__(self, url: str, generate_s: float) -> None:
        self._url = url
        self._generate_s = generate_s
        self._version = WeightVersion(1, 0)
        self._payloads = payloads_of(FRAME_BYTES)
        self._random = random.Random(0)
        self.lease_s: list[float] = []
        self.submit_s: list[float] = []

    async def follow_versions(self) -> None:
        broker = await open_broker(self._url, RUN)
        while True:
            _, announced = await broker.versions.current()
            self._version = announced or self._version
            await asyncio.sleep(_VERSION_POLL_S)

    async def worker(self, name: str) -> None:
        await asyncio.sleep(self._random.uniform(0, self._generate_s))
        broker = await open_broker(self._url, RUN)
        while True:
            asked, version = time.perf_counter(), self._version
            reply = await broker.leases.lease(name, version, 1, TTL_S)
            self.lease_s.append(time.perf_counter() - asked)
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._generate_s)
            for lease in reply.leases:
                trajectory = sampled_by(version, self._payloads.named(lease.tid))
                asked = time.perf_counter()
                assert await broker.leases.submit(lease, trajectory) is SubmitOutcome.ACCEPTED
                self.submit_s.append(time.perf_counter() - asked)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 2) for q in (50, 99)} | {"count": len(seconds)}
