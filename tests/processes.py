"""What a test has left running."""

import re

import psutil


def children_left() -> list[psutil.Process]:
    """Processes below this one, but for those that multiprocessing starts once and that end with its process."""
    running = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in running if not re.search("resource_tracker|forkserver", " ".join(one.cmdline()))]
