"""The time of a step by kernel and operator: those that take most, and the seconds in which the GPU was idle."""

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from .case import TrainingStep

LISTED = 15
LONGEST_NAME = 110


def of_steps(training: "TrainingStep", steps: int, on_gpu: bool) -> dict[str, Any]:
    """Return means a step. Kernels of several streams overlap, so their sum may exceed the wall clock. Collective."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiled:
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        if on_gpu:
            torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - began) * 1e3 / steps
    events = [event for event in profiled.key_averages() if not getattr(event, "is_user_annotation", False)]
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    operators = [event for event in events if event.device_type.name == "CPU"]
    kernels_ms = _milliseconds(kernels, "self_device_time_total", steps)
    operators_ms = _milliseconds(operators, "self_device_time_total" if on_gpu else "self_cpu_time_total", steps)
    return {
        "profile": {
            "wall_ms": round(wall_ms, 2),
            "kernels_ms": round(sum(ms for _, ms, _ in kernels_ms), 2),
            "kernel_launches": sum(count for _, _, count in kernels_ms),
            "kernels": _top(kernels_ms, wall_ms),
            "operators": _top(operators_ms, wall_ms),
        }
    }


def _milliseconds(events: list[Any], field: str, steps: int) -> list[tuple[str, float, int]]:
    """Return (name, milliseconds a step, calls a step), longest first."""
    found = [(event.key, getattr(event, field) / 1e3 / steps, event.count // steps) for event in events]
    return sorted(found, key=lambda one: -one[1])


def _top(rows: list[tuple[str, float, int]], wall_ms: float) -> list[dict[str, Any]]:
    return [
        {"name": name[:LONGEST_NAME], "ms": round(ms, 3), "calls": calls, "share": round(ms / wall_ms, 4)}
        for name, ms, calls in rows[:LISTED]
        if ms > 0
    ]
