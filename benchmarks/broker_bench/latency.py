"""How long a lease, a submission and a take take while a thousand workers share the server.

The workers are coroutines of one process, each with a `Broker` and so with connections of its own, as if it were a
process; the learner is another process. A worker holds one sample at a time and "generates" it in a random time, so
that the load is what so many workers ask for, not all that the server can bear.
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from broker import Broker, open_broker
from broker.client.leases import SubmitOutcome
from broker.schema import Lease, WeightVersion, WorkerInfo

from .learner import BATCH, Learner, Run
from .payloads import GROUP_SIZE, payloads_of
from .servers import cpu_seconds, fresh_server
from .worker import TTL_S, sampled_by

RUN = "latency"
FRAME_BYTES = 10_000
HEARTBEAT_S = 1.0
_MAX_LAG = 64
_VERSION_POLL_S = 0.05


def crowds(*, counts: Sequence[int], samples_per_s: float, samples: int) -> list[dict[str, Any]]:
    """The same load from more and more workers, which also report and renew their leases every second."""
    return [
        measure(workers=workers, generate_s=workers / samples_per_s, samples=samples, heartbeat_s=HEARTBEAT_S)
        for workers in counts
    ]


def measure(*, workers: int, generate_s: float, samples: int, heartbeat_s: float = 0.0) -> dict[str, Any]:
    """Percentiles in milliseconds over so many samples, with the AOF synced every second.

    `heartbeat_s`: how often each worker reports and renews its lease; 0: never. The server's processor time is of all
    that it does between the first worker's start and the last sample, connecting included.
    """
    with fresh_server("everysec") as server:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(server.url, theirs, workers, generate_s, samples, heartbeat_s))
        run = Run(groups=(samples + 3 * workers + 10 * BATCH) // GROUP_SIZE, max_lag=_MAX_LAG)
        before = cpu_seconds(server.pid)
        takes = uvloop.run(_learn(server.url, run, process, mine))
        spent = cpu_seconds(server.pid) - before
        leases, submits, wall_s = mine.recv()
        process.join()
    return {
        "workers": workers,
        "mean_generation_s": generate_s,
        "samples_per_s": round(samples / wall_s),
        "heartbeat_s": heartbeat_s,
        "server_cpu_us_per_sample": round(1e6 * spent / (samples + workers)),
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


def _work(url: str, pipe: Connection, workers: int, generate_s: float, samples: int, heartbeat_s: float) -> None:
    pipe.send(uvloop.run(_crowd(_Crowd(url, generate_s, heartbeat_s), workers, samples)))


async def _crowd(crowd: "_Crowd", workers: int, samples: int) -> tuple[list[float], list[float], float]:
    """(leases, submissions, all together), in seconds; every worker's first sample does not count."""
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

    def __init__(self, url: str, generate_s: float, heartbeat_s: float) -> None:
        self._url = url
        self._generate_s = generate_s
        self._heartbeat_s = heartbeat_s
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
        broker, held = await open_broker(self._url, RUN), list[Lease]()
        async with asyncio.TaskGroup() as tasks:
            if self._heartbeat_s:
                tasks.create_task(self._beat(broker, name, held))
            tasks.create_task(self._sample(broker, name, held))

    async def _beat(self, broker: Broker, name: str, held: list[Lease]) -> None:
        """As a worker does it."""
        while True:
            await broker.leases.renew(held, TTL_S)
            await broker.status.heartbeat(_info(name, self._version, len(held)), TTL_S)
            await broker.status.state()
            await asyncio.sleep(self._heartbeat_s)

    async def _sample(self, broker: Broker, name: str, held: list[Lease]) -> None:
        while True:
            asked, version = time.perf_counter(), self._version
            reply = await broker.leases.lease(name, version, 1, TTL_S)
            self.lease_s.append(time.perf_counter() - asked)
            held[:] = reply.leases
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._generate_s)
            for lease in reply.leases:
                trajectory = sampled_by(version, self._payloads.named(lease.tid))
                asked = time.perf_counter()
                assert await broker.leases.submit(lease, trajectory) is SubmitOutcome.ACCEPTED
                self.submit_s.append(time.perf_counter() - asked)


def _info(name: str, version: WeightVersion, active: int) -> WorkerInfo:
    return WorkerInfo(
        worker=name,
        host="bench",
        pid=1,
        engine="none",
        state="generating",
        version=version,
        broadcast_epoch=0,
        wants_broadcast=False,
        capacity=1,
        active=active,
        generated_tokens=0,
        submitted=0,
        tokens_per_s=0.0,
        swaps=0,
    )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 2) for q in (50, 99)} | {"count": len(seconds)}
