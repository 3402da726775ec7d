"""The durations of a lease, a submission and a take while a thousand workers share the server.

The workers are coroutines of a few processes, each with a `Broker` and so with connections of its own, as if it were a
process; the learner is another process. One worker more has a process to itself, as real ones do: its durations are the
server's doing, and those of the crowd also that of a busy Python process. A worker holds one sample at a time and
"generates" it in a random time, so that the load is that of so many workers, not the most that the server can bear. It
waits for a notification and looks for versions as real workers do.
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from headway.broker import Broker, open_broker
from headway.broker.client.leases import SubmitOutcome
from headway.broker.schema import Lease, WeightVersion
from headway.broker.schema.status import WorkerInfo

from .load import BATCH, GROUP_SIZE, TTL_S, Learner, Run, cpu_seconds, fresh_server, payloads_of, sampled_by

RUN = "latency"
FRAME_BYTES = 10_000
HEARTBEAT_S = 1.0
PROCESSES = 4
"""The number of processes that the workers share; with a single one its own speed would be the limit."""
ALONE_GENERATE_S = 0.05
"""The time in which the worker with a process of its own generates a sample."""
_MAX_LAG = 64
_LOOK_S = 1.0

_Result = tuple[list[float], list[float], float, float]
"""The durations of leases and submissions in seconds, and the monotonic times of the beginning and the end."""


def measure(workers: int, generate_s: float, samples: int) -> dict[str, Any]:
    """Return percentiles in milliseconds over so many samples, with the AOF synced every second.

    Each worker reports and renews its lease every HEARTBEAT_S. The server's processor time covers all its work between
    the first worker's start and the last sample, connecting included.
    """
    with fresh_server("everysec") as server:
        processes = min(PROCESSES, workers)
        load = _Load(server.url, generate_s, workers // processes, samples // processes)
        run = Run(groups=(2 * samples + 3 * workers + 10 * BATCH) // GROUP_SIZE, max_lag=_MAX_LAG)
        before, began_s = cpu_seconds(server.pid), time.perf_counter()
        alone = _Load(server.url, ALONE_GENERATE_S, 1, samples // 8)
        takes, (own, *results) = uvloop.run(_learn(run, [alone, *[load] * processes]))
        wall_s, spent = time.perf_counter() - began_s, cpu_seconds(server.pid) - before
    return {
        "workers": workers,
        "mean_generation_s": generate_s,
        "samples_per_s": round(samples / (max(one[3] for one in results) - min(one[2] for one in results))),
        "server_cpu_us_per_sample": round(1e6 * spent / (samples + workers)),
        "server_share_of_a_core": round(spent / wall_s, 3),
        "frame_bytes": FRAME_BYTES,
        "lease_ms": _percentiles([lease for one in results for lease in one[0]]),
        "submit_ms": _percentiles([submit for one in results for submit in one[1]]),
        "lease_of_a_worker_alone_in_its_process_ms": _percentiles(own[0]),
        "submit_of_a_worker_alone_in_its_process_ms": _percentiles(own[1]),
        "take_64_and_decode_ms": _percentiles(takes),
    }


async def _learn(run: Run, loads: "Sequence[_Load]") -> tuple[list[float], list[_Result]]:
    """Train until the workers of a process for each load have finished."""
    broker, context = await open_broker(loads[0].url, RUN), multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in loads]
    processes = [
        context.Process(target=_work, args=(load, theirs, n))
        for n, (load, (_, theirs)) in enumerate(zip(loads, pipes, strict=True))
    ]
    try:
        learner = await Learner.begin(broker, run)
        for process in processes:
            process.start()
        training = asyncio.create_task(_train(learner))
        while not (all(mine.poll() for mine, _ in pipes) and learner.take_s):
            if training.done():
                training.result()
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process of workers has failed")
            await asyncio.sleep(0.1)
        training.cancel()
        return learner.take_s, [mine.recv() for mine, _ in pipes]
    finally:
        for mine, _ in pipes:
            mine.close()  # this ends the workers
        for process in processes:
            process.join()
        await broker.close()


async def _train(learner: Learner) -> None:
    async for _ in learner.steps():
        pass


@dataclass(frozen=True)
class _Load:
    """The load of one process of workers."""

    url: str
    generate_s: float
    workers: int
    samples: int


def _work(load: _Load, pipe: Connection, number: int) -> None:
    uvloop.run(_crowd(load, pipe, number))


async def _crowd(load: _Load, pipe: Connection, number: int) -> None:
    """Send the result once there are enough samples, and go on until the other processes have enough, too.

    Every worker's first sample does not count.
    """
    crowd, first, enough = _Crowd(load, number), load.workers, load.workers + load.samples
    working = [asyncio.create_task(crowd.worker(f"w{number}-{index}")) for index in range(load.workers)]
    started = 0.0
    while True:
        await asyncio.sleep(0.01)
        for task in working:
            if task.done():
                task.result()
        if not started and len(crowd.submit_s) >= first:
            started = time.perf_counter()
        if started and len(crowd.submit_s) >= enough:
            break
    pipe.send((crowd.lease_s[first:], crowd.submit_s[first:enough], started, time.perf_counter()))
    await asyncio.to_thread(pipe.poll, None)  # until the other end is closed


class _Crowd:
    """Workers that share nothing but a clock."""

    def __init__(self, load: _Load, number: int) -> None:
        self._load = load
        self._payloads = payloads_of(FRAME_BYTES)
        self._random = random.Random(number)
        self.lease_s: list[float] = []
        self.submit_s: list[float] = []

    async def worker(self, name: str) -> None:
        await asyncio.sleep(self._random.uniform(0, self._load.generate_s))
        one = _Worker(await open_broker(self._load.url, RUN), name)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.hear())
            tasks.create_task(one.look())
            tasks.create_task(one.beat())
            tasks.create_task(self._sample(one))

    async def _sample(self, one: "_Worker") -> None:
        while True:
            asked, version = time.perf_counter(), one.version
            reply = await one.broker.leases.lease(one.name, version, 1, TTL_S)
            self.lease_s.append(time.perf_counter() - asked)
            one.held = reply.leases
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._load.generate_s)
            for lease in reply.leases:
                trajectory = sampled_by(version, self._payloads.named(lease.tid))
                asked = time.perf_counter()
                assert await one.broker.leases.submit(lease, trajectory) is SubmitOutcome.ACCEPTED
                self.submit_s.append(time.perf_counter() - asked)


class _Worker:
    """A worker beside its samples, with the calls of `rollout_workers.worker` and `weightsync.subscriber`."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.version = WeightVersion(1, 0)
        self.held: Sequence[Lease] = ()
        self._was_rung = asyncio.Event()

    async def hear(self) -> None:
        heard = b"0"
        while True:
            heard = await self.broker.rendezvous.wait_for_notification(heard)
            self._was_rung.set()

    async def look(self) -> None:
        while True:
            self._was_rung.clear()
            self.version = (await self.broker.versions.peek()).announced or self.version
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._was_rung.wait()

    async def beat(self) -> None:
        while True:
            info = WorkerInfo(
                worker=self.name,
                host="bench",
                pid=1,
                engine="none",
                state="generating",
                version=self.version,
                broadcast_epoch=0,
                wants_broadcast=False,
                capacity=1,
                active=len(self.held),
                generated_tokens=0,
                submitted=0,
                tokens_per_s=0.0,
                swaps=0,
            )
            await self.broker.status.heartbeat(info, TTL_S, self.held, TTL_S)
            await asyncio.sleep(HEARTBEAT_S)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 2) for q in (50, 99)} | {"count": len(seconds)}
