"""Processes that a test kills, and those that it has left running."""

import os
import re
import signal
import sys
import time

import psutil
import redis

from broker.server.embedded import EmbeddedServer
from deploy.launch import tether

KEPT = r"resource_tracker|forkserver|/ray/(core|_private|autoscaler|dashboard)/|^ray::"
"""Matches name and arguments. An actor of Ray that is about to end has no arguments any more, but still its name."""


def until_written(server: EmbeddedServer) -> None:
    """It waits with writing while a sync is under way."""
    with redis.Redis.from_url(server.url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            time.sleep(0.01)


def kill(server: EmbeddedServer) -> None:
    """As a crash does that loses nothing of what was acknowledged. Until it is gone, so that it can start again."""
    until_written(server)
    os.kill(server.pid, signal.SIGKILL)
    while server.is_alive():
        pass


def tethered(*argv: str) -> list[str]:
    """The command, which the kernel ends if the tests' process is killed. Only the main thread may start it."""
    return [sys.executable, "-IS", tether.__file__, str(os.getpid()), *argv]


def children_left() -> list[psutil.Process]:
    """Processes below this one, but for those that multiprocessing or Ray starts once and that end with its process."""
    return [one for one in psutil.Process().children(recursive=True) if _is_left(one)]


def _is_left(process: psutil.Process) -> bool:
    try:
        names = process.name(), *process.cmdline()
        return process.status() != psutil.STATUS_ZOMBIE and not re.search(KEPT, " ".join(names))
    except psutil.NoSuchProcess:  # it ends just now
        return False
