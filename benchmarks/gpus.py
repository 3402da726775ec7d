"""The GPUs of this process: their names, ways to share them, and their use during the steps that count."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.repeated import repeated

LOOK_S = 0.2
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment of processes that leave NVLink's multicast alone, which not every machine lends."""


def gpu_names(count: int) -> list[str]:
    """Return the first `count` names in CUDA_VISIBLE_DEVICES, or of the machine. Raises SystemExit for too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    if len(names) < count:
        raise SystemExit(f"{count} GPUs are wanted, and CUDA_VISIBLE_DEVICES has {visible}")
    return names[:count]


def on_host(name: str) -> dict[str, str]:
    """Return the environment of a process that NCCL takes for one on another host.

    NCCL wants one rank on a GPU of a host, so processes that share a GPU are in one group this way; they use sockets.
    """
    return {"NCCL_HOSTID": name}


@dataclass
class Utilization:
    """For each GPU, the share of time in which any kernel ran while the counted steps were made."""

    metrics: Path
    first: int
    """The number of steps before those that count."""
    steps: int
    gpus: int
    seen: list[list[float]] = field(default_factory=list)

    def look(self) -> None:
        """Take a look. It does nothing where there is no GPU, or the counted steps have not begun."""
        done = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
        if self.first <= done < self.steps:
            self.seen.append(gpu_use(gpu_names(self.gpus)))

    def mean(self) -> list[float]:
        """Return the mean, by GPU."""
        return [round(fmean(of_one) / 100, 3) for of_one in zip(*self.seen, strict=True)]


def gpu_use(names: Sequence[str]) -> list[float]:
    """Return the use of each GPU in per cent; [] without any."""
    if not names or shutil.which("nvidia-smi") is None:
        return []
    query = ("nvidia-smi", "-i", ",".join(names), "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    return [float(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]


def watching(utilization: Utilization) -> AbstractContextManager[None]:
    """Look at it until the end of the block."""
    return repeated(utilization.look, LOOK_S)
