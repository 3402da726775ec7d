"""Functions that kill a process, or find those that a test has left running."""

import gc
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from headway.broker.server.embedded import EmbeddedServer
from headway.broker.user_code import host
from headway.deploy.launch import parent_watch

KEPT = r"resource_tracker|forkserver|/ray/(core|_private|autoscaler|dashboard)/|^ray::"
"""Matches name and arguments. An actor of Ray that is about to end has lost its arguments, but still has its name."""


def until_written(server: EmbeddedServer) -> None:
    """Wait until the server has written its log: a server delays writing while a sync is under way."""
    with redis.Redis.from_url(server.url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            time.sleep(0.01)


def kill(server: EmbeddedServer) -> None:
    """Kill the server and wait for its end, so that it can start again; no acknowledged write is lost."""
    until_written(server)
    os.kill(server.pid, signal.SIGKILL)
    while server.is_alive():
        pass


def tethered(*argv: str) -> list[str]:
    """Return a command that the kernel ends if the tests' process is killed. Only the main thread may start it."""
    return [sys.executable, "-IS", parent_watch.__file__, str(os.getpid()), *argv]


def is_alive(process: psutil.Process) -> bool:
    """Return whether it runs; one that has ended and was not waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process and those below it map, and that have a name."""
    found = set()
    for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found |= {Path(mapped.path) for mapped in one.memory_maps() if mapped.path.startswith("/dev/shm/")}
    return {path for path in found if path.exists()}


def children_left() -> list[psutil.Process]:
    """Return the processes below this one, without those of multiprocessing or Ray that end together with it."""
    return [one for one in psutil.Process().children(recursive=True) if _is_left(one)]


def await_end_of_hosts() -> None:
    """Delete what is garbage and keeps a host of user code running, and wait until none is left, or 30 s are over."""
    latest = time.monotonic() + 30
    while any(map(_is_host, children_left())) and time.monotonic() < latest:
        gc.collect()
        time.sleep(0.05)


def _is_host(process: psutil.Process) -> bool:
    try:
        return host.__name__ in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _is_left(process: psutil.Process) -> bool:
    try:
        names = process.name(), *process.cmdline()
        return process.status() != psutil.STATUS_ZOMBIE and not re.search(KEPT, " ".join(names))
    except psutil.NoSuchProcess:  # it ends just now
        return False
