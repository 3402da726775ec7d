"""The GPUs of this process: their names, ways to share them, and their use."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean

from .processes import repeated

LOOK_S = 0.5
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment of processes that leave NVLink's multicast alone, which not every machine lends."""
Look = tuple[float, list[float]]
"""A time of the clock, and the use of each GPU in per cent."""


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


def placement(gpus: int, per_gpu: int = 1) -> tuple[str, ...]:
    """Return overrides that put the learner on the first GPU, and so many workers on each of the others."""
    if gpus < 2:
        return ("workers.count=1",) if gpus else ("learner.device=cpu", "engine.kind=embedded", "engine.device=cpu")
    others = gpu_names(gpus)[1:] * per_gpu
    devices = f"workers.devices=[{','.join(others)}]"
    return (f"workers.count={len(others)}", devices, "engine.options.gpu_memory_utilization=0.8")


def gpu_use(names: Sequence[str]) -> list[float]:
    """Return the use of each GPU in per cent; [] without any."""
    if not names or shutil.which("nvidia-smi") is None:
        return []
    query = ("nvidia-smi", "-i", ",".join(names), "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    return [float(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]


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
