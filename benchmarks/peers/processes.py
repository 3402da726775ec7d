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
from typing import TextIO

import psutil

GRACE_S = 10.0
"""Seconds between the request to end and the end."""
LOOK_S = 0.1
WATCH_S = 1.0
"""Seconds between looks at the processes that a command has started."""


class Group:
    """A command in a process group of its own, and the processes that it starts, until `end`.

    Its output and its words on standard error go to files, or to this process's standard error.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None = None,
        *,
        output: TextIO | None = None,
        words: TextIO | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, stdout=output or sys.stderr, stderr=words, env=environment, cwd=directory, process_group=0
        )
        self._children: list[psutil.Process] = []

    def poll(self, wait_s: float = 0.0) -> int | None:
        """Return the exit code of the command, or None if it has not ended within so many seconds.

        Whichever processes it has now are those that `end` ends besides.
        """
        with suppress(psutil.NoSuchProcess):
            self._children = psutil.Process(self._process.pid).children(recursive=True) or self._children
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None

    def end(self) -> None:
        """End all of them, gently at first."""
        _end(self._process)
        _kill(self._children)


def finish_group(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], directory: Path | None = None
) -> None:
    """Run the command in a process group of its own, its output on stderr, and end the group with it.

    Raises CalledProcessError or TimeoutExpired.
    """
    deadline = time.monotonic() + timeout_s
    group = Group(command, environment, directory)  # standard output has only one JSON object
    try:
        while (code := group.poll(min(WATCH_S, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(command, timeout_s)
    finally:
        group.end()
    if code:
        raise subprocess.CalledProcessError(code, command)


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
