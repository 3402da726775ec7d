"""A TCP link between one process and the server, which can be cut, stalled and slowed down, and floods of connections.

Bytes sent into a stalled link arrive when it flows again, also if the sender has given up meanwhile: so the server sees
late and repeated commands, as from a real network.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

_CHUNK = 1 << 16


class Link:
    """Listens on a port of its own and connects each client to `port`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self.delay_s = 0.0
        """The delay of every piece, both ways."""

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        """End every connection and refuse new ones."""
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def stall(self) -> None:
        """Let nothing through, lose nothing."""
        self._flows.clear()

    def mend(self) -> None:
        """Restore the link."""
        self._is_cut, self.delay_s = False, 0.0
        self._flows.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            if not self._is_cut:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
                await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carry one way to its end; the other way ends with it."""
        self._open.add(sink)
        try:
            while piece := await source.read(_CHUNK):
                await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                if sink.is_closing():
                    break
                sink.write(piece)
                await sink.drain()
        except OSError:
            pass  # cut, or the server died
        finally:
            self._open.discard(sink)
            sink.close()


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
