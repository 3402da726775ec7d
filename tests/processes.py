"""Processes that a test kills, and those that it has left running."""

import os
import re
import signal

import psutil

from broker.server import EmbeddedServer


def kill(server: EmbeddedServer) -> None:
    """As a crash does, without a chance to write anything; until it is gone, so that it can be started again."""
    os.kill(server.pid, signal.SIGKILL)
    while server.is_alive():
        pass


def children_left() -> list[psutil.Process]:
    """Processes below this one, but for those that multiprocessing starts once and that end with its process."""
    running = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in running if not re.search("resource_tracker|forkserver", " ".join(one.cmdline()))]
