"""A program that kills process groups and removes directories once its input ends, as its parent is killed.

It reads lines: `+ GROUP DIRECTORY` adds one, `- GROUP` takes it off. It imports nothing of Headway, to start in an
instant.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read until the input ends; kill and remove what is left."""
    left: dict[int, str] = {}
    for line in sys.stdin:
        sign, group, *directory = line.rstrip("\n").split(" ", 2)
        if sign == "+":
            left[int(group)] = directory[0]
        else:
            left.pop(int(group), None)
    for one, name in left.items():
        with suppress(OSError):
            os.killpg(one, signal.SIGKILL)
        shutil.rmtree(name, ignore_errors=True)


if __name__ == "__main__":
    main()
