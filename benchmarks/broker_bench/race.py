"""Laps: one producing and one consuming process, the same for every transport."""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal, Self

import uvloop

from .servers import Durability, cpu_seconds, fresh_server
from .transports import ON_A_SERVER, ON_RAY, open_transport
from .transports.base import Receipt, Task

Role = Literal["producer", "consumer"]

_LAP_DEADLINE_S = 300.0
_WARM_UP = 128
"""The trajectories of a first lap that does not count: libraries are loaded, and daemons start their processes."""


@dataclass(frozen=True)
class Entry:
    """The settings of one lap: a transport, on a server with this durability if it needs one."""

    transport: str
    aof: Durability | None
    frame_bytes: int
    count: int


@dataclass(frozen=True)
class Lap:
    """The costs of one lap, from the producer's start to the last trajectory in the consumer's arrays."""

    entry: Entry
    wall_s: float
    producer_cpu_s: float
    consumer_cpu_s: float
    server_cpu_s: float

    @property
    def per_s(self) -> float:
        """Return trajectories a second."""
        return self.entry.count / self.wall_s

    @property
    def cpu_s_each(self) -> float:
        """Return the processor time of all three processes for one trajectory."""
        return (self.producer_cpu_s + self.consumer_cpu_s + self.server_cpu_s) / self.entry.count


@dataclass(frozen=True)
class _Finished:
    started: float
    """The start on the machine's monotonic clock, which the processes share."""
    ended: float
    cpu_s: float


class Pair:
    """The two processes. They stay for several laps, so that none pays for imports."""

    def __init__(self) -> None:
        self._ends = {role: _End(role) for role in ("consumer", "producer")}
        self.laps = 0
        """The number of laps so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends.values():
            end.close()

    def lap(self, transport: str, task: Task) -> tuple[_Finished, _Finished]:
        """Return (producer, consumer). Raises RuntimeError where one of them failed."""
        consumer, producer = self._ends["consumer"], self._ends["producer"]
        self.laps += 1
        for end in (consumer, producer):  # the consumer's end sets up the parts that both use
            end.prepare(transport, task)
        for end in (consumer, producer):
            end.go()
        received = consumer.result()
        return producer.result(), received


class _End:
    def __init__(self, role: Role) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, role), name=f"benchmark-{role}")
        self._process.start()
        theirs.close()

    def prepare(self, transport: str, task: Task) -> None:
        """Prepare a process; return when it is ready to go."""
        self._pipe.send((transport, task))
        self.result()

    def go(self) -> None:
        self._pipe.send("go")

    def result(self) -> _Finished:
        if not self._pipe.poll(_LAP_DEADLINE_S):
            raise RuntimeError(f"{self._process.name} has said nothing for {_LAP_DEADLINE_S:g} s")
        said: _Finished = self._pipe.recv()
        return said

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, role: Role) -> None:
    """Serve laps in one process until the pipe is closed."""
    while True:
        try:
            transport, task = pipe.recv()
        except EOFError:
            return
        pipe.send(uvloop.run(_run(pipe, role, transport, task)))


async def _run(pipe: Connection, role: Role, name: str, task: Task) -> _Finished:
    transport = open_transport(name)
    end = transport.producer(task) if role == "producer" else transport.consumer(task)
    assert task.payloads  # made before the clock starts
    async with end as work:
        pipe.send(None)
        pipe.recv()
        started, cpu = time.monotonic(), time.process_time()
        receipt = await work()
        finished = _Finished(started, time.monotonic(), time.process_time() - cpu)
    if isinstance(receipt, Receipt):
        receipt.check(task)
    return finished


def laps(entries: list[Entry], rounds: int) -> Iterator[Lap]:
    """Run all entries, round after round.

    Entries that are compared follow each other closely, so that a disturbance of the machine affects all alike. Ray's
    daemons run only while transports that need them do.
    """
    on_ray = [entry for entry in entries if entry.transport in ON_RAY]
    others = [entry for entry in entries if entry.transport not in ON_RAY]
    for _ in range(rounds):
        for together in (others, on_ray):
            if together:
                yield from _round(sorted(together, key=lambda entry: (entry.frame_bytes, entry.aof or "")))


def _round(entries: list[Entry]) -> Iterator[Lap]:
    with _place(entries[0].transport) as address, Pair() as pair:
        for first in {entry.transport: entry for entry in entries}.values():
            _lap(pair, replace(first, count=_WARM_UP), address)
        for entry in entries:
            yield _lap(pair, entry, address)


@contextmanager
def _place(transport: str) -> Iterator[str]:
    """Yield the address where the transport's two ends meet; each lap on a server has its own."""
    if transport in ON_RAY:
        from .transports.ray_cluster import started

        with started() as address:
            yield address
    else:
        with tempfile.TemporaryDirectory(prefix="headway-") as directory:
            yield f"ipc://{directory}/socket"


def _lap(pair: Pair, entry: Entry, address: str) -> Lap:
    with ExitStack() as stack:
        server = stack.enter_context(fresh_server(entry.aof)) if entry.aof else None
        assert (server is not None) == (entry.transport in ON_A_SERVER)
        task = Task(server.url if server else address, entry.count, entry.frame_bytes, pair.laps)
        before = cpu_seconds(server.pid) if server else 0.0
        producer, consumer = pair.lap(entry.transport, task)
        spent = cpu_seconds(server.pid) - before if server else 0.0
    return Lap(entry, consumer.ended - producer.started, producer.cpu_s, consumer.cpu_s, spent)
