"""A peer's command with all processes that it starts, none of which outlives it: they would keep a GPU's memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 10.0
"""Seconds between the request to end and the end."""
LOOK_S = 0.1


def finish_group(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], directory: Path | None = None
) -> None:
    """Run the command in a process group of its own, its output on stderr, and end the group with it.

    Raises CalledProcessError or TimeoutExpired.
    """
    with subprocess.Popen(
        command, stdout=sys.stderr, env=environment, cwd=directory, process_group=0
    ) as process:  # standard output has only one JSON object
        try:
            code = process.wait(timeout_s)
        finally:
            _end(process)
    if code:
        raise subprocess.CalledProcessError(code, command)


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
