"""One call's time on a GPU by what its kernels do, and the time in which none ran."""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GROUPS = (
    ("compiled", r"triton"),
    ("attention", r"flash|fmha|attn|attention"),
    ("optimizer", r"adam"),
    ("clip and zero", r"lpnorm|multi_tensor.*(mul|fill|zero)"),
    ("gemm", r"gemm|nvjet|xmma|cublas|splitk|gemv|tensorop"),
    ("copies", r"memcpy|memset|copy|catarray|split_with_sizes|chunk_cat|fillfunctor|index|gather|scatter"),
    ("norm", r"norm"),
)
"""A kernel belongs to the first group whose pattern its name contains, in any case of letters."""

OTHER = "elementwise"
LISTED = 14
LONGEST_NAME = 100
NAME_OF_PAUSE = 48


def grouped(call: Callable[[], object]) -> dict[str, Any]:
    """Return the milliseconds of the second of two calls: of each group of kernels, of no kernel, in all; and the
    kernels that take longest."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - began) * 1e3
    on_gpu = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    ran = [event for event in on_gpu if not getattr(event, "is_user_annotation", False)]
    found = summary([(event.name, event.time_range.start, event.time_range.end) for event in ran])
    return {"wall_ms": round(wall_ms, 2), **found}


def summary(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Return milliseconds of (name, beginning, end in microseconds): of groups, of pauses between them with the kernels
    around each, of kernels."""
    groups, names = dict[str, float](), dict[str, tuple[float, int]]()
    ended = min((start for _, start, _ in kernels), default=0.0)
    pauses, last = dict[str, tuple[float, int]](), ""
    for name, start, end in sorted(kernels, key=lambda one: one[1]):
        group = next((group for group, pattern in GROUPS if re.search(pattern, name.lower())), OTHER)
        groups[group] = groups.get(group, 0.0) + (end - start) / 1e3
        spent, count = names.get(name, (0.0, 0))
        names[name] = spent + (end - start) / 1e3, count + 1
        if start > ended:
            between = f"{last[:NAME_OF_PAUSE]} | {name[:NAME_OF_PAUSE]}"
            spent, count = pauses.get(between, (0.0, 0))
            pauses[between] = spent + (start - ended) / 1e3, count + 1
        if end > ended:
            last = name
        ended = max(ended, end)
    longest = sorted(names.items(), key=lambda one: -one[1][0])[:LISTED]
    return {
        "groups_ms": {name: round(ms, 2) for name, ms in sorted(groups.items(), key=lambda one: -one[1])},
        "idle_ms": round(sum(ms for ms, _ in pauses.values()), 2),
        "kernels": len(kernels),
        "pauses": [
            f"{ms:.2f} ms {count}x {between}"
            for between, (ms, count) in sorted(pauses.items(), key=lambda one: -one[1][0])[:LISTED]
        ],
        "longest": [f"{ms:.2f} ms {count}x {name[:LONGEST_NAME]}" for name, (ms, count) in longest],
    }
