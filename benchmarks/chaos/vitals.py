"""The memory, descriptors and threads of learner, server and workers during a trial."""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

EVERY_S = 2.0
GROWN_UP_S = 4.0
"""The age in seconds below which a process is still starting."""
PARTS = 6
"""The number of parts of the trial, each of which has a median of its own."""
Sample = tuple[float, float, float]
"""MiB of resident memory, open descriptors, threads."""


class Vitals:
    """Samples the processes that `pids` names, by role."""

    def __init__(self, pids: Callable[[], Mapping[str, list[int]]]) -> None:
        self._pids = pids
        self._samples = defaultdict[str, list[Sample]](list)

    async def watch(self) -> None:
        """Take samples until cancelled."""
        first_seen: dict[int, float] = {}
        while True:
            await asyncio.sleep(EVERY_S)
            now = time.monotonic()
            for role, pids in self._pids().items():
                for pid in pids:
                    if now - first_seen.setdefault(pid, now) >= GROWN_UP_S:
                        with suppress(OSError):  # the process has just ended
                            self._samples[role].append(_sample(pid))

    def trend(self) -> dict[str, dict[str, list[float]]]:
        """Return each measure's median in each part of the trial, by role; fewer parts where there are few samples."""
        return {role: _medians(samples) for role, samples in sorted(self._samples.items())}


def _medians(samples: list[Sample]) -> dict[str, list[float]]:
    size = -(-len(samples) // PARTS)
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    names = ("memory_mib", "descriptors", "threads")
    return {
        name: [round(statistics.median(one[place] for one in part), 1) for part in parts]
        for place, name in enumerate(names)
    }


def _sample(pid: int) -> Sample:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    descriptors = len(os.listdir(process / "fd"))
    threads = len(os.listdir(process / "task"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, descriptors, threads
