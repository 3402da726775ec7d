"""A server of its own for every lap, and its processor time."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import redis

from headway.broker.server.embedded import EmbeddedServer

Durability = Literal["off", "everysec"]
"""The durability of the append-only file."""

_MAXMEMORY_BYTES = 8 << 30


@contextmanager
def fresh_server(aof: Durability) -> Iterator[EmbeddedServer]:
    """Yield an empty server on a unix socket, with the embedded server's own configuration."""
    with (
        tempfile.TemporaryDirectory(prefix="headway-") as directory,
        EmbeddedServer(Path(directory), maxmemory_bytes=_MAXMEMORY_BYTES) as server,
    ):
        if aof == "off":
            with redis.Redis.from_url(server.url) as client:
                client.config_set("appendonly", "no")
        yield server


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of the process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
