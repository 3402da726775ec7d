"""Ends what user code has left running: its processes have a variable of their own in their environment."""

import os
import signal
from contextlib import suppress

MOST_LOOKS = 20
"""A process that starts another one while it is looked for is found at the next look."""


def kill_marked(variable: str, value: str) -> None:
    """Kill all processes that were started with this variable, however they left their group and their parent."""
    mark = f"{variable}={value}".encode()
    for _ in range(MOST_LOOKS):
        found = _marked(mark)
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _marked(mark: bytes) -> list[int]:
    """Return the processes of this machine that have the mark, and that this one may look at."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0") and int(name) != os.getpid():
                found.append(int(name))
    return found
