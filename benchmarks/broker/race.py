"""Trajectories a second through every transport: one producing and one consuming process, the same for all."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

import uvloop

from benchmarks.command import tell

from .load import BATCH, Durability, cpu_seconds, fresh_server, payloads_of
from .transports import NEEDS, TRANSPORTS, Receipt, Task, is_installed, ray_cluster

Role = Literal["producer", "consumer"]

_LAP_DEADLINE_S = 300.0
_WARM_UP = 128
"""The trajectories of a first lap that does not count: libraries are loaded, and daemons start their processes."""
COUNTS = {10_000: 6144, 100_000: 1536, 300_000: 512}
"""The trajectories of one lap, by the size of their frames."""
_SHARES = {"ray_queue": 1 / 6}
"""Slow transports move fewer, so that their laps end in the same time."""
TARGETS = (
    ("streams", 10_000, 0.7),
    ("streams", 100_000, 0.9),
    ("xread_one", 10_000, 3.0),
    ("xread_one", 100_000, 3.0),
    ("ray_queue", 10_000, 20.0),
    ("ray_queue", 100_000, 8.0),
)
"""Headway moves at least so many times as much as the other one, with frames of so many bytes."""


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
    transport = TRANSPORTS[name]()
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


def measure(
    names: Sequence[str], counts: Mapping[int, int], durabilities: Sequence[Durability], *, rounds: int
) -> dict[str, Any]:
    """Measure all installed transports, round after round, and judge their targets.

    Entries that are compared follow each other closely, so that a disturbance of the machine affects all alike. Ray's
    daemons run only while transports that need them do.
    """
    here = [name for name in names if is_installed(name)]
    entries = [
        Entry(name, aof, frame_bytes, max(1, round(most * _SHARES.get(name, 1.0) / BATCH)) * BATCH)
        for frame_bytes, most in counts.items()
        for name in here
        for aof in ((None,) if name in NEEDS else durabilities)
    ]
    done: dict[Entry, list[Lap]] = {entry: [] for entry in entries}
    for _ in range(rounds):
        for needs_ray in (False, True):
            together = [entry for entry in entries if (entry.transport == "ray_queue") == needs_ray]
            for lap in _round(together) if together else ():
                done[lap.entry].append(lap)
                tell(f"{lap.entry}: {lap.per_s:.0f}/s")
    return {
        "promises": {name: TRANSPORTS[name]().promise for name in here},
        "not_installed": [name for name in names if name not in here],
        "laps": [_summary(entry, laps) for entry, laps in done.items()],
        "targets": [verdict for target in TARGETS for verdict in _verdicts(target, done)],
    }


def _verdicts(target: tuple[str, int, float], done: Mapping[Entry, Sequence[Lap]]) -> Iterator[dict[str, Any]]:
    """Yield medians of the rounds' ratios, on servers of the same durability: a disturbance that lasts is in both."""
    against, frame_bytes, at_least = target
    sized = [entry for entry in done if entry.frame_bytes == frame_bytes]
    for mine in sized:
        for theirs in sized:
            if mine.transport != "headway" or theirs.transport != against or theirs.aof not in (mine.aof, None):
                continue
            ratio = statistics.median(a.per_s / b.per_s for a, b in zip(done[mine], done[theirs], strict=True))
            verdict = {"against": against, "aof": mine.aof, "frame_bytes": frame_bytes, "at_least": at_least}
            yield verdict | {"ratio": round(ratio, 2), "pass": ratio >= at_least}


def _summary(entry: Entry, laps: Sequence[Lap]) -> dict[str, Any]:
    rate = statistics.median(lap.per_s for lap in laps)
    frame_bytes = payloads_of(entry.frame_bytes).frame_bytes
    return {
        "transport": entry.transport,
        "aof": entry.aof,
        "frame_bytes": round(frame_bytes),
        "trajectories": entry.count,
        "trajectories_per_s": round(rate),
        "mb_per_s": round(rate * frame_bytes / 1e6, 1),
        "rounds": [round(lap.per_s) for lap in laps],
        "cpu_us_per_trajectory": {
            who: round(1e6 * statistics.median(getattr(lap, f"{who}_cpu_s") for lap in laps) / entry.count)
            for who in ("producer", "consumer", "server")
        },
    }


def _round(entries: list[Entry]) -> Iterator[Lap]:
    with _place(entries[0].transport) as address, Pair() as pair:
        for first in {entry.transport: entry for entry in entries}.values():
            _lap(pair, replace(first, count=_WARM_UP), address)
        for entry in entries:
            yield _lap(pair, entry, address)


@contextmanager
def _place(transport: str) -> Iterator[str]:
    """Yield the address where the transport's two ends meet; each lap on a server has its own."""
    if transport == "ray_queue":
        with ray_cluster() as address:
            yield address
    else:
        with tempfile.TemporaryDirectory(prefix="headway-") as directory:
            yield f"ipc://{directory}/socket"


def _lap(pair: Pair, entry: Entry, address: str) -> Lap:
    with ExitStack() as stack:
        server = stack.enter_context(fresh_server(entry.aof)) if entry.aof else None
        task = Task(server.url if server else address, entry.count, entry.frame_bytes, pair.laps)
        before = cpu_seconds(server.pid) if server else 0.0
        producer, consumer = pair.lap(entry.transport, task)
        spent = cpu_seconds(server.pid) - before if server else 0.0
    return Lap(entry, consumer.ended - producer.started, producer.cpu_s, consumer.cpu_s, spent)
