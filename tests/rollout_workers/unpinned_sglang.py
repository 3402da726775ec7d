"""SGLang's scheduler with ordinary memory wherever it would pin some: a machine without a GPU has none that is pinned.

It keeps the rows of chosen experts there, and sets up its layers with adapters by such memory.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.rollout_workers.engines.sglang import lora_pool
from headway.rollout_workers.engines.sglang import sglang_requests as requests
from headway.rollout_workers.engines.sglang.sglang_processes import PARENT_BOUND, ParentBoundFunction


def unpin(patch: pytest.MonkeyPatch) -> None:
    """Let SGLang start with this scheduler where there is no GPU."""
    if not torch.cuda.is_available():
        for module in (lora_pool, requests):
            patch.setattr(module, "can_pin", lambda: True)
        scheduler = ParentBoundFunction("tests.rollout_workers.unpinned_sglang", "run_scheduler_process")
        patch.setitem(PARENT_BOUND, "run_scheduler_process_func", scheduler)


def run_scheduler_process(*arguments: Any, **named: Any) -> Any:
    """Run SGLang's own scheduler."""
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    from sglang.srt.managers.scheduler import run_scheduler_process as run
    from sglang.srt.state_capturer import base

    base.ALLOC_MEMORY_FUNCS = defaultdict(lambda: allocated)
    return run(*arguments, **named)


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function without its argument `pin_memory`."""

    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return made


def allocated(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)
