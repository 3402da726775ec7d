"""Connections of no use: some stay silent, some send bytes that no process of the run sends, all of them stay."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

CONNECTIONS = 300
JUNK_BYTES = 64
_LISTENS = "0A"
_EVERY = 3
"""The share of connections that send junk: one in so many."""


async def flood(port: int, seconds: float, connections: int = CONNECTIONS) -> None:
    """Flood a port on this machine for so long."""
    opened = await asyncio.gather(*(_open(port, number) for number in range(connections)))
    await asyncio.sleep(seconds)
    for writer in opened:
        if writer is not None:
            writer.transport.abort()


def listening_ports(pids: Iterable[int]) -> list[int]:
    """Return the TCP ports at which these processes wait for connections."""
    ours = {inode for pid in pids for inode in _sockets(pid)}
    found = set[int]()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and inode in ours:
                found.add(int(local.rpartition(":")[2], 16))
    return sorted(found)


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the process's sockets."""
    found = set[str]()
    with suppress(OSError):  # the process has just ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


async def _open(port: int, number: int) -> asyncio.StreamWriter | None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        if number % _EVERY == 0:
            writer.write(os.urandom(JUNK_BYTES))
        return writer
    return None
