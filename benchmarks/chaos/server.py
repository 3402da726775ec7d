"""The real server and its faults: kill -9, power loss, a stop, full memory, damaged bytes."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from headway.broker.server.embedded import EmbeddedServer

from .disk import Disk
from .process import send
from .trial import Trial

LOST_S = 1.0
"""The seconds of writes that `appendfsync everysec` may lose."""
_DAMAGE = """
local length = redis.call('STRLEN', KEYS[1])
if length == 0 then return 0 end
local place = math.floor(length * tonumber(ARGV[1]))
local byte = string.byte(redis.call('GETRANGE', KEYS[1], place, place))
redis.call('SETRANGE', KEYS[1], place, string.char(255 - byte))
return 1
"""
MOST_CLIENTS = 250
"""The most clients of the server, fewer than a flood has."""
_SPARE_BYTES = 16 << 10
"""The bytes that are left to a server whose memory is full."""


class FragileServer:
    """A server that suffers one fault at a time: use `async with server.lock`."""

    def __init__(self, trial: Trial) -> None:
        self._directory = trial.directory / "server"
        self.disk = Disk(self._directory)
        self._appendfsync = trial.appendfsync
        self.port = _free_port()
        self._server = EmbeddedServer(
            self._directory,
            port=self.port,
            appendfsync=self._appendfsync,
            settings=(f"maxclients {MOST_CLIENTS}",),
        )
        self.url = self._server.url
        self._client: Any = redis.Redis(port=self.port, socket_timeout=5.0)
        self.lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.is_alive() else None

    async def start(self) -> None:
        """Start the server on its data, and return when it answers. Does nothing where it is alive."""
        await asyncio.to_thread(self._server.start)

    async def close(self) -> None:
        await self._client.aclose()
        self.resume()
        await asyncio.to_thread(self._server.stop)

    async def kill(self) -> None:
        """Send SIGKILL; the system keeps all that it was given."""
        send(self._server.pid, signal.SIGKILL)
        await asyncio.to_thread(self._await_death)

    async def lose_power(self, lost_s: float = LOST_S) -> None:
        """Send SIGKILL, after which the writes of the last `lost_s` never reached the disk.

        The server stops syncing before, so that it promised no client that the lost writes are durable (WAITAOF).
        """
        if self._appendfsync == "always":
            await self.kill()
            return
        await self._client.config_set("appendfsync", "no")
        written = self._log()
        kept = written.stat().st_size
        await asyncio.sleep(lost_s)
        await self.kill()
        os.truncate(written, kept)

    def stop(self) -> None:
        """Send SIGSTOP."""
        send(self._server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        if self._server.is_alive():
            send(self._server.pid, signal.SIGCONT)

    @asynccontextmanager
    async def full_memory(self) -> AsyncIterator[None]:
        """Have the server refuse all commands that need memory meanwhile."""
        held = int((await self._client.config_get("maxmemory"))["maxmemory"])
        used = int((await self._client.info("memory"))["used_memory"])
        await self._client.config_set("maxmemory", used + _SPARE_BYTES)
        try:
            yield
        finally:
            await self._client.config_set("maxmemory", held)

    async def damage(self, rng: random.Random, kind: str) -> bool:
        """Change a byte in one of the run's blobs of this kind, and return whether there was one."""
        keys = [key async for key in self._client.scan_iter(f"*:{kind}:*", count=1000)]
        if not keys:
            return False
        return bool(await self._client.eval(_DAMAGE, 1, rng.choice(sorted(keys)), rng.random()))

    def _await_death(self) -> None:
        while self._server.is_alive():
            time.sleep(0.01)

    def _log(self) -> Path:
        """Return the file to which writes are appended."""
        files = (self._directory / "appendonlydir").glob("*.incr.aof")
        return max(files, key=lambda path: int(path.suffixes[-3].removeprefix(".")))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
