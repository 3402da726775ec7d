"""A worker's endpoint beside `vllm serve`: the same requests of the same client to a server that has a process, and an
engine, of its own.

    python -m benchmarks.agent_throughput.endpoint ORDER      a worker's endpoint, until the process is ended

Each of the client's connections has one request under way. With a worker it goes on in a session for `TURNS` requests,
each a new conversation, and then in the next one; a session has a lease, whose turns are durable before they are told.
`not durable` are sessions without one.
"""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil
import uvloop

from benchmarks import command
from benchmarks.processes import Group
from headway.broker import Broker
from headway.broker.schema import Lease, WeightVersion
from headway.rollout_workers.agents.calls import Session
from headway.rollout_workers.agents.endpoint.connections import EndpointSettings
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.agents.session import EpisodeSession
from headway.rollout_workers.agents.tree import EpisodeRecorder
from headway.rollout_workers.decoding import Decoding, load_decoding
from headway.rollout_workers.engines.vllm.fork_server import prepare_environment
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from .agents import RULES
from .engines import EngineOrder, opened
from .meter import process_s
from .parts import agent_config, end_tokens, fed, leases_of, played_sample

TURNS = 8
"""Requests of a session."""
READY_S = 240.0
LEASED_AT_ONCE = 512
WORDS = 370
"""Words of a prompt of about 500 tokens."""
ON_CPU = ("--enforce-eager", "--distributed-executor-backend", "uni")
COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')


class EndpointOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    engine: EngineOrder
    server: Literal["headway", "vllm"]
    answers: tuple[int, ...] = (1, 16, 128)
    """Tokens of an answer."""
    parallel: tuple[int, ...] = (1, 64, 256)
    seconds: float = 5.0
    port: int = 0


class LeasedSessions:
    """Opens a session for each name that a client uses; one that begins with `d` has a lease."""

    def __init__(self, order: EndpointOrder, broker: Broker, version: WeightVersion, engine: Any) -> None:
        self._broker, self._version, self._engine = broker, version, engine
        self._model = Path(order.engine.model)
        self._decoding: Decoding = load_decoding(self._model, end_tokens(self._model))
        self._format = open_format(self._model, self._decoding.stop_token_ids, "chatml")
        self._config = agent_config({})
        self._most = TURNS * (order.engine.max_model_len + 1)
        self._free: list[Lease] = []
        self._open: dict[str, EpisodeSession] = {}
        self._more: asyncio.Task[None] | None = None

    async def lease(self) -> None:
        """Lease more samples."""
        self._free += await leases_of(self._broker, self._version, LEASED_AT_ONCE)

    def session(self, name: str) -> Session:
        """See Sessions."""
        found = self._open.get(name)
        if found is None:
            if len(self._open) > 2048:  # clients have gone on long since
                del self._open[next(iter(self._open))]
            found = self._open[name] = self._opened(name)
        return found

    def _opened(self, name: str) -> EpisodeSession:
        is_durable = name.startswith("d")
        lease = self._free.pop() if is_durable else self._free[0]
        if len(self._free) < LEASED_AT_ONCE and (self._more is None or self._more.done()):
            self._more = asyncio.create_task(self.lease())
        sample, _ = played_sample(
            self._broker,
            lease,
            EpisodeRecorder(prompt=lease.prompt.token_ids),
            self._decoding,
            self._sampled,
            self._most,
        )
        if not is_durable:
            sample = sample_without_broker(sample)
        recorder = sample.recorder
        assert isinstance(recorder, EpisodeRecorder)
        return EpisodeSession(
            sample, recorder, self._format, self._config, model="policy", text_of=self._decoding.decode
        )

    async def _sampled(self, request: Any, recorder: Recorder) -> None:
        await generate(self._engine, request, recorder)


def sample_without_broker(sample: Any) -> Any:
    """Return a sample whose turns are kept nowhere."""
    from dataclasses import replace

    async def kept() -> bool:
        return True

    async def intended(_: object) -> list[str]:
        return []

    return replace(sample, keep=kept, intend=intended)


def serve(told: object) -> None:
    """Serve as a worker does until the process is ended."""
    uvloop.run(_serve(msgspec.convert(told, EndpointOrder)))


async def _serve(order: EndpointOrder) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with fed(4096) as (broker, version, _):
        engine = await opened(order.engine, version)
        sessions = LeasedSessions(order, broker, version, engine)
        await sessions.lease()
        endpoint = await Endpoint.start(sessions, port=order.port, settings=EndpointSettings())
        await over.wait()
        await endpoint.close()
        await engine.close()


def commands(order: EndpointOrder) -> list[str]:
    """Return the command of a server."""
    engine = order.engine
    if order.server == "headway":
        return [sys.executable, "-m", __name__, msgspec.json.encode(order).decode()]
    return [
        *(sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", engine.model),
        *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(order.port)),
        *("--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.places)),
        *("--dtype", "float32" if engine.device == "cpu" else "bfloat16", "--disable-uvicorn-access-log"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *(ON_CPU if engine.device == "cpu" else ("--gpu-memory-utilization", str(engine.memory))),
    ]


@contextmanager
def serving(order: EndpointOrder) -> Iterator[psutil.Process]:
    """Have a server until the end of the block."""
    if order.server == "vllm" and order.engine.device == "cpu":
        prepare_environment(1)
    group = Group(commands(order), {**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield psutil.Process(group._process.pid)
    finally:
        group.end()


class Connection:
    """One connection of the client: HTTP/1.1 without a library, so that the client is not what is measured."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = re.findall(rb"content-length: (\d+)", answered)
        return int(answered[9:12]), await reader.readexactly(int(length))

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()


class Load:
    """Requests of many connections."""

    def __init__(self, order: EndpointOrder, server: psutil.Process) -> None:
        self._order, self._server = order, server
        self._number = 0
        self._latencies: list[float] = []
        self._tokens = 0

    async def until_ready(self) -> None:
        """Wait until the server answers. Raises RuntimeError where it ends."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self._server.is_running() or self._server.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError("the server has ended")
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                status, _ = await Connection(self._order.port).post(*self._request("x-ready", 1, captures=False))
                if status == 200:
                    return
            await asyncio.sleep(0.5)
        raise RuntimeError(f"the server does not answer after {READY_S:g} s")

    async def point(self, parallel: int, tokens: int, *, is_durable: bool, captures: bool) -> dict[str, Any]:
        """Return the figures of so many connections, with answers of so many tokens."""
        self._latencies, self._tokens = [], 0
        prefix = ("d" if is_durable else "x") + f"{self._number}-"
        self._number += 1
        children = self._server.children(recursive=True)
        end = time.monotonic() + self._order.seconds + 1.0
        clients = [
            asyncio.create_task(self._client(f"{prefix}{one}", tokens, end, captures=captures))
            for one in range(parallel)
        ]
        await asyncio.sleep(1.0)  # warms up
        self._latencies.clear()
        self._tokens, began, before = 0, time.monotonic(), self._cpu(children)
        own = time.process_time()
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        seconds, after, count, counted = (
            time.monotonic() - began,
            self._cpu(children),
            len(self._latencies),
            self._tokens,
        )
        own = time.process_time() - own
        await asyncio.gather(*clients)
        if not count:
            return {"error": "no request was answered"}
        front, whole = after[0] - before[0], after[1] - before[1]
        return {
            "requests_per_s": round(count / seconds, 1),
            "tokens_per_s": round(counted / seconds, 1),
            "front_cpu_ms_per_request": round(1000 * front / count, 4),
            "front_cpu_us_per_token": round(1e6 * front / max(1, counted), 2),
            "front_share_of_a_core": round(front / seconds, 3),
            "all_cpu_ms_per_request": round(1000 * whole / count, 4),
            "p50_ms": round(1000 * float(np.percentile(self._latencies[:count], 50)), 2),
            "p99_ms": round(1000 * float(np.percentile(self._latencies[:count], 99)), 2),
            "client_share_of_a_core": round(own / seconds, 3),
        }

    async def _client(self, name: str, tokens: int, end: float, *, captures: bool) -> None:
        connection = Connection(self._order.port)
        number = 0
        try:
            while time.monotonic() < end:
                request = self._request(f"{name}-{number // TURNS}", tokens, captures=captures, number=number)
                began = time.monotonic()
                status, body = await connection.post(*request)
                if status != 200:
                    raise RuntimeError(f"HTTP {status}: {body[:300]!r}")
                self._latencies.append(time.monotonic() - began)
                self._tokens += sum(map(int, COUNT.findall(body)))
                number += 1
        finally:
            connection.close()

    def _request(self, name: str, tokens: int, *, captures: bool, number: int = 0) -> tuple[str, bytes]:
        """Return the path and the body of a request whose conversation no other has."""
        words = f"{name} {number} {RULES * (1 + WORDS // len(RULES.split()))}".split()[:WORDS]
        asked: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": tokens,
        }
        if captures:
            asked |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        path = f"/s/{name}/v1/chat/completions" if self._order.server == "headway" else "/v1/chat/completions"
        return path, msgspec.json.encode(asked)

    def _cpu(self, children: list[psutil.Process]) -> tuple[float, float]:
        """Return the CPU seconds of the server's first process, and of all of its processes."""
        front, others = process_s(self._server.pid), 0.0
        for child in children:
            with suppress(psutil.NoSuchProcess):
                others += process_s(child.pid)
        return front, front + others


async def _measure(order: EndpointOrder, server: psutil.Process) -> dict[str, Any]:
    load, found = Load(order, server), dict[str, Any]()
    began = time.monotonic()
    await load.until_ready()
    found["ready_after_s"] = round(time.monotonic() - began, 1)
    points: list[tuple[str, Callable[[], Awaitable[dict[str, Any]]]]] = []
    is_ours = order.server == "headway"
    for tokens in order.answers:
        for parallel in order.parallel:
            name = f"{tokens} tokens, {parallel} parallel"
            points.append((name, _point(load, parallel, tokens, is_durable=False, captures=False)))
            if is_ours:
                durable = _point(load, parallel, tokens, is_durable=True, captures=False)
                points.append((f"{name}, durable", durable))
    middle = order.answers[len(order.answers) // 2], order.parallel[len(order.parallel) // 2]
    name = f"{middle[0]} tokens, {middle[1]} parallel, tokens told"
    points.append((name, _point(load, middle[1], middle[0], is_durable=False, captures=True)))
    for name, point in points:
        try:
            found[name] = await point()
        except Exception as error:  # noqa: BLE001 - the figures of other points are to be told
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        command.tell(f"{order.server}: {name}: {found[name]}")
    return found


def _point(load: Load, parallel: int, tokens: int, **more: bool) -> Callable[[], Awaitable[dict[str, Any]]]:
    return lambda: load.point(parallel, tokens, is_durable=more["is_durable"], captures=more["captures"])


def measure(told: object) -> dict[str, Any]:
    """Return the figures of one server."""
    order = msgspec.convert(told, EndpointOrder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    order = msgspec.structs.replace(order, port=port)
    with serving(order) as server:
        found: dict[str, Any] = uvloop.run(_measure(order, server))
    return found


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
