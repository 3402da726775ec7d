"""The idle time of each GPU while a contestant runs, seen from outside, in the same way for all."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from benchmarks.gpus import gpu_names, gpu_use

LOOK_S = 0.5
Look = tuple[float, list[float]]
"""A time of the clock, and the use of each GPU in per cent."""


@contextmanager
def looking(gpus: int) -> Iterator[list[Look]]:
    """Look at the first GPUs until the end of the block; what was seen stands in the list that it gives."""
    seen: list[Look] = []
    is_over = threading.Event()

    def look() -> None:
        names = gpu_names(gpus)
        while not is_over.wait(LOOK_S):
            seen.append((time.time(), gpu_use(names)))

    thread = threading.Thread(target=look, name="gpu-idle")
    if gpus:
        thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        if gpus:
            thread.join()


def idle(seen: Sequence[Look], first: float, last: float) -> list[float] | None:
    """Return the share of time without a kernel between two times of the clock, by GPU; None if nothing was seen."""
    uses = [use for at, use in seen if first <= at <= last and use]
    return [round(1 - fmean(of_one) / 100, 3) for of_one in zip(*uses, strict=True)] if uses else None
