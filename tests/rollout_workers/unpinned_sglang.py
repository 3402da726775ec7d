"""SGLang's scheduler with the rows of chosen experts in ordinary memory: a machine without a GPU has none that is
pinned."""

from collections import defaultdict
from typing import Any

import torch


def run_scheduler_process(*arguments: Any, **named: Any) -> Any:
    """Run SGLang's own scheduler."""
    from sglang.srt.managers.scheduler import run_scheduler_process as run
    from sglang.srt.state_capturer import base

    base.ALLOC_MEMORY_FUNCS = defaultdict(lambda: unpinned)
    return run(*arguments, **named)


def unpinned(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)
