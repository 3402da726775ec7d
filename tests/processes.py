"""What a test has left running."""

import psutil


def children_left() -> list[psutil.Process]:
    """Processes below this one, but for the tracker that multiprocessing starts once and that ends with its process."""
    running = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in running if "resource_tracker" not in " ".join(one.cmdline())]
