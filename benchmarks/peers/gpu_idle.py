"""The idle time of each GPU while a contestant runs, seen from outside, in the same way for all."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean

from benchmarks.gpus import gpu_names, gpu_use
from benchmarks.repeated import repeated

LOOK_S = 0.5
Look = tuple[float, list[float]]
"""A time of the clock, and the use of each GPU in per cent."""


@contextmanager
def looking(gpus: int) -> Iterator[list[Look]]:
    """Look at the first GPUs until the end of the block; what was seen stands in the list that it gives."""
    seen: list[Look] = []
    names = gpu_names(gpus)
    with repeated(lambda: seen.append((time.time(), gpu_use(names))), LOOK_S) if gpus else nullcontext():
        yield seen


def idle(seen: Sequence[Look], first: float, last: float) -> list[float] | None:
    """Return the share of time without a kernel between two times of the clock, by GPU; None if nothing was seen."""
    uses = [use for at, use in seen if first <= at <= last and use]
    return [round(1 - fmean(of_one) / 100, 3) for of_one in zip(*uses, strict=True)] if uses else None
