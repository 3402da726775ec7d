"""Processes that a test kills, and those that it has left running."""

import os
import re
import signal
import time

import psutil
import redis

from broker.server.embedded import EmbeddedServer

KEPT = r"resource_tracker|forkserver|/ray/(core|_private|autoscaler|dashboard)/|^ray::"


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


def children_left() -> list[psutil.Process]:
    """Processes below this one, but for those that multiprocessing or Ray starts once and that end with its process."""
    running = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [
        one
        for one in running
        if not re.search(
            r"resource_tracker|forkserver|/ray/core/|/ray/_private/|/ray/autoscaler/|/ray/dashboard/|^ray::",
            " ".join(one.cmdline()),
        )
    ]
