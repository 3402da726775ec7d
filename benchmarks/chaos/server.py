"""The real server and its faults: kill -9, power loss, a stop, full memory, damaged bytes, a full disk.

A full disk is a file system of its own, which needs root; elsewhere only a limit on the size of a process's files can
stop its writes.
"""

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from headway.broker.server.embedded import EmbeddedServer

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
            self._directory, port=self.port, appendfsync=self._appendfsync, settings=(f"maxclients {MOST_CLIENTS}",)
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


ROOM_BYTES = 1 << 30
"""The size of the disk, whose memory is taken only when it is used."""
_PAGE = 4096
_ATTEMPTS = 20


class Disk:
    """A tmpfs at `directory`, from `mount` to `unmount`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.is_mounted = False

    def mount(self) -> None:
        """Mount the disk, or leave an ordinary directory where the system does not allow a mount."""
        self._directory.mkdir(parents=True, exist_ok=True)
        options = f"size={ROOM_BYTES},mode=700"
        self.is_mounted = os.geteuid() == 0 and _mount("-t", "tmpfs", "-o", options, "tmpfs", str(self._directory))

    def unmount(self) -> None:
        """Unmount the disk and lose its files. Idempotent."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self._directory], check=False)
            self.is_mounted = False

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """Leave no room for anything more meanwhile."""
        assert self.is_mounted, "full disks need a file system of their own"
        try:
            for _ in range(_ATTEMPTS):  # a process that writes meanwhile makes the size too small
                held = os.statvfs(self._directory)
                if self._resize((held.f_blocks - held.f_bfree) * held.f_frsize + _PAGE):
                    break
            yield
        finally:
            assert self._resize(ROOM_BYTES), f"{self._directory} cannot be given room again"

    def _resize(self, size: int) -> bool:
        return _mount("-o", f"remount,size={size}", str(self._directory))


@asynccontextmanager
async def no_file_grows(pid: int) -> AsyncIterator[None]:
    """Let no file of this process grow meanwhile, on a system that allows no mounts."""
    soft, hard = _limit(pid)
    _limit(pid, (0, hard))
    try:
        yield
    finally:
        _limit(pid, (soft, hard))


def _limit(pid: int, new: tuple[int, int] | None = None) -> tuple[int, int]:
    """Set a limit on the size of the files that the process writes, and return the earlier limit."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_FSIZE, *([new] if new else []))
    except ProcessLookupError:  # the process has ended meanwhile
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
