"""More than one server: a cluster, a primary with a replica, and a proxy as a virtual address or a bad network."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import redis
from redis.crc import key_slot

from headway.broker.keys import Keys
from headway.broker.server.embedded import EmbeddedServer
from tests.processes import kill

LOCAL = "127.0.0.1"
_RANGES = ((0, 5460), (5461, 10922), (10923, 16383))
_DEADLINE_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        port: int = probe.getsockname()[1]
        return port


def port_of(server: EmbeddedServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def ask(server: EmbeddedServer, *command: str | int | bytes) -> Any:
    """Send one command to this very server."""
    with redis.Redis.from_url(server.url, socket_timeout=5) as client:
        return client.execute_command(*command)


def wait_until(holds: Callable[[], bool], deadline_s: float = _DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


class Topology:
    """Servers that are stopped together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.build()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def build(self) -> None:
        """Start the servers, and let them find each other."""
        raise NotImplementedError

    def start(self, name: str, *settings: str) -> EmbeddedServer:
        settings = ("repl-diskless-sync-delay 0", *settings)
        return self._running.enter_context(EmbeddedServer(self._directory / name, port=free_port(), settings=settings))


class Cluster(Topology):
    """A cluster of three primaries with a third of the slots each, and with replicas where a test asks for them."""

    def build(self) -> None:
        self._bus_ports = dict[EmbeddedServer, int]()
        self.nodes = [self._node(str(number)) for number in range(len(_RANGES))]
        for node, slots in zip(self.nodes, _RANGES, strict=True):
            ask(node, "CLUSTER", "ADDSLOTSRANGE", *slots)
        for node in self.nodes[1:]:
            self._meet(node, self.nodes[0])
        self.wait_until_whole()

    @property
    def url(self) -> str:
        return f"redis+cluster://{LOCAL}:{port_of(self.nodes[0])}"

    def home(self, run: str) -> EmbeddedServer:
        """Return the node that holds the run."""
        slot = key_slot(Keys(run).verbs.encode())
        return next(node for node, (_, last) in zip(self.nodes, _RANGES, strict=True) if slot <= last)

    def add_replica(self, of: EmbeddedServer) -> EmbeddedServer:
        """Add a replica, and return once it has all data and every node knows it."""
        replica = self._node("replica")
        self._meet(replica, of)
        wanted = ask(of, "CLUSTER", "MYID")
        wait_until(lambda: wanted in ask(replica, "CLUSTER", "NODES"))
        ask(replica, "CLUSTER", "REPLICATE", wanted)
        known = ask(replica, "CLUSTER", "MYID")
        wait_until(lambda: _has_all(replica) and all(known in ask(node, "CLUSTER", "NODES") for node in self.nodes))
        return replica

    def moving(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> Iterator[None]:
        """Move a slot as administrators do; yield before each key, and before the slot's new owner is told."""
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))
        yield
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1):
            ask(source, "MIGRATE", LOCAL, port_of(target), keys[0], 0, 5000)
            yield
        for node in (target, source):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))

    def wait_until_whole(self) -> None:
        wait_until(lambda: all(b"cluster_state:ok" in ask(node, "CLUSTER", "INFO") for node in self.nodes))
        wait_until(lambda: all(len(ask(node, "CLUSTER", "SLOTS")) == len(_RANGES) for node in self.nodes))

    def _node(self, name: str) -> EmbeddedServer:
        bus = free_port()
        node = self.start(name, "cluster-enabled yes", f"cluster-port {bus}", "cluster-node-timeout 2000")
        self._bus_ports[node] = bus
        return node

    def _meet(self, node: EmbeddedServer, other: EmbeddedServer) -> None:
        ask(node, "CLUSTER", "MEET", LOCAL, port_of(other), self._bus_ports[other])


class Replicated(Topology):
    """A primary, a replica of it, and one address in front that leads to whichever is in charge."""

    def build(self) -> None:
        self.primary = self.start("primary")
        self.replica = self.start("replica", f"replicaof {LOCAL} {port_of(self.primary)}")
        wait_until(lambda: _has_all(self.replica))
        self.proxy = self._running.enter_context(Proxy(port_of(self.primary)))

    @property
    def url(self) -> str:
        return f"redis://{LOCAL}:{self.proxy.port}"

    def fail_over(self) -> None:
        """Kill the primary; the replica takes its place at the same address."""
        kill(self.primary)
        ask(self.replica, "REPLICAOF", "NO", "ONE")
        self.proxy.lead_to(port_of(self.replica))


class Proxy:
    """A proxy that carries bytes to a port of this machine. With a context it ends TLS."""

    def __init__(self, target: int, context: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._flows = asyncio.Event()
        self._writers = set[asyncio.StreamWriter]()
        self._carrying = set[asyncio.Task[None]]()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, target: int) -> None:
        """Cut the existing connections; new ones go to the other port."""
        self._target = target
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        self._call(self._cut())

    def stall(self) -> None:
        """Carry nothing, and end nothing either."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_DEADLINE_S)

    async def _listen(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._accept, LOCAL, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(LOCAL, self._target)
        except OSError:
            writer.close()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            carrying = self._loop.create_task(self._carry(source, sink))
            self._carrying.add(carrying)
            carrying.add_done_callback(self._carrying.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(1 << 16):
                await self._flows.wait()
                sink.write(piece)
                await sink.drain()
        sink.close()

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _close(self) -> None:
        self._server.close()
        self._flows.set()
        await self._cut()
        await asyncio.gather(*self._carrying)


def is_redis_7_0(server: EmbeddedServer) -> bool:
    """Whether the server is Redis 7.0, which cannot tell its durable offset and counts every look as use."""
    return bool(ask(server, "INFO", "server")["redis_version"].startswith("7.0."))


def wait_until_caught_up(primary: EmbeddedServer, replica: EmbeddedServer) -> None:
    """Return once the replica has all that the primary has now."""
    written = ask(primary, "INFO", "replication")["master_repl_offset"]
    wait_until(lambda: ask(replica, "INFO", "replication")["slave_repl_offset"] >= written)


def _has_all(replica: EmbeddedServer) -> bool:
    return bool(ask(replica, "INFO", "replication").get("master_link_status") == "up")
