"""A peer's command with all processes that it starts, none of which outlives it: they would keep a GPU's memory. Ranks
of torchrun lead groups of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_S = 10.0
"""Seconds between the request to end and the end."""
LOOK_S = 0.1
WATCH_S = 1.0
"""Seconds between looks at the processes that a command has started."""


def finish_group(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], directory: Path | None = None
) -> None:
    """Run the command in a process group of its own, its output on stderr, and end the group with it.

    Raises CalledProcessError or TimeoutExpired.
    """
    with subprocess.Popen(
        command, stdout=sys.stderr, env=environment, cwd=directory, process_group=0
    ) as process:  # standard output has only one JSON object
        children: list[psutil.Process] = []
        try:
            code = _watched(process, timeout_s, children)
        finally:
            _end(process)
            _kill(children)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _watched(process: "subprocess.Popen[bytes]", timeout_s: float, children: list[psutil.Process]) -> int:
    """Return the exit code, and keep in `children` whichever processes it was last seen to have."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(psutil.NoSuchProcess):
            children[:] = psutil.Process(process.pid).children(recursive=True) or children
        try:
            return process.wait(min(WATCH_S, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(process.args, timeout_s) from None


def _kill(children: Sequence[psutil.Process]) -> None:
    """Kill those that are left; psutil knows a process from a later one of the same number."""
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, GRACE_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the processes of the group that this one leads, gently at first."""
    deadline = time.monotonic() + GRACE_S
    request: int = signal.SIGTERM
    while True:
        process.poll()
        try:
            os.killpg(process.pid, request)
        except ProcessLookupError:
            return
        if request == signal.SIGKILL:
            return
        time.sleep(LOOK_S)
        request = signal.SIGKILL if time.monotonic() > deadline else 0
