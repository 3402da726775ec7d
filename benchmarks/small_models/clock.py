"""Seconds and launches of a call on a GPU: until the process goes on, and until the device is done."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LISTED = 14
LONGEST_NAME = 90


def timed(call: Callable[[], object], repeats: int = 5, warm_ups: int = 2) -> dict[str, float]:
    """Return medians in milliseconds: `host_ms` until the call returns, `ms` until the device is done."""
    host, whole = [], []
    for number in range(warm_ups + repeats):
        wait()
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        wait()
        if number >= warm_ups:
            host.append((returned - began) * 1e3)
            whole.append((time.perf_counter() - began) * 1e3)
    return {"host_ms": round(statistics.median(host), 3), "ms": round(statistics.median(whole), 3)}


class PartClock:
    """Milliseconds of each part of a piece of work: until the process goes on, and until the device is done."""

    def __init__(self) -> None:
        self._spent: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Make the call, add what it takes to the part of that name, and return its result."""
        wait()
        began = time.perf_counter()
        result = call()
        host = time.perf_counter() - began
        wait()
        host_ms, ms = self._spent.setdefault(name, [0.0, 0.0])
        self._spent[name] = [host_ms + host * 1e3, ms + (time.perf_counter() - began) * 1e3]
        return result

    def clear(self) -> None:
        """Forget what was measured."""
        self._spent.clear()

    @property
    def parts(self) -> dict[str, list[float]]:
        """Both figures of each part."""
        return {name: [round(host_ms, 2), round(ms, 2)] for name, (host_ms, ms) in self._spent.items()}


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profiled(call: Callable[[], object]) -> dict[str, Any]:
    """Return one call's kernels: their number, their milliseconds in sum, and those that take most; and the calls of
    the driver that take the process most time."""
    call()
    wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        wait()
    events = [event for event in found.key_averages() if not getattr(event, "is_user_annotation", False)]
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    driver = [event for event in events if event.key.startswith(("cuda", "cu"))]
    operators = [event for event in events if event.device_type.name == "CPU" and event not in driver]
    return {
        "kernels": sum(event.count for event in kernels),
        "kernels_ms": round(sum(event.self_device_time_total for event in kernels) / 1e3, 3),
        "longest": _listed(kernels, "self_device_time_total"),
        "driver": _listed(driver, "self_cpu_time_total"),
        "host": _listed(operators, "self_cpu_time_total"),
    }


def _listed(events: list[Any], field: str) -> list[str]:
    longest = sorted(events, key=lambda event: -getattr(event, field))[:LISTED]
    return [f"{getattr(event, field) / 1e3:.2f} ms {event.count}x {event.key[:LONGEST_NAME]}" for event in longest]


def waits(call: Callable[[], object]) -> dict[str, int]:
    """Return how often each line of Python waited for the device."""
    wait()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    return dict(Counter(lines))
