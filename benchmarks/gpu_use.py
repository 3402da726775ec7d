"""How busy GPUs are while a run makes the steps that count."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

LOOK_S = 0.2


@dataclass
class Utilization:
    """Of each GPU, the share of the time in which any kernel ran, while the counted steps were made."""

    metrics: Path
    first: int
    """Steps before those that count."""
    steps: int
    seen: list[list[float]] = field(default_factory=list)

    def look(self) -> None:
        """Nothing where there is no GPU, or the counted steps have not begun."""
        done = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
        if self.first <= done < self.steps:
            self.seen.append(gpu_use())

    def mean(self) -> list[float]:
        """By GPU."""
        return [round(fmean(of_one) / 100, 3) for of_one in zip(*self.seen, strict=True)]


def gpu_use() -> list[float]:
    """Per cent, by GPU; [] without any."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    return [float(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]


@contextmanager
def watching(utilization: Utilization) -> Iterator[None]:
    """Look at it until the end of the block."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            utilization.look()

    thread = threading.Thread(target=watch, name="utilization")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
