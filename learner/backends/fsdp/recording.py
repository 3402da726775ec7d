"""Launches of kernels are recorded as CUDA graphs, all in one pool of memory."""

from collections.abc import Callable
from typing import Protocol

import torch

from headway.learner.config import ComputeConfig

ROOM = 2
"""The device must have this many times the memory of all graphs free, for rows of other shapes."""

MOST_PARAMETERS = 1 << 30
"""The largest model whose kernels are replayed. A larger one computes for longer than its kernels take to launch."""


class PassRecorder(Protocol):
    """Records calls, to repeat them on the same memory."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make a call that is about to be recorded, so that all that is made once is made outside of the recording."""
        ...

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats what `call` computes. Recording itself need not compute it. The call may be
        made once to be recorded, or each time. Raises RuntimeError where that is impossible."""
        ...

    def has_room(self) -> bool:
        """Return whether recordings leave enough memory free."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool. What one of them leaves there is gone once another runs, unless a tensor of its
    recording is still held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bytes = 0

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make the call on the stream of the recording. Libraries keep workspaces for each stream and thread; made
        within a recording, such a one would hold a part of the pool for good."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Capture the call's kernels. Other threads may use the device meanwhile, so only this one's calls are
        checked."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph leaves its own stream current where ending the capture fails.
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with current, capture:
            call()
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        replay: Callable[[], None] = graph.replay
        return replay

    def has_room(self) -> bool:
        """Return whether rows of other shapes have room beside the pool."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free >= ROOM * self._bytes


def open_recorder(device: torch.device) -> PassRecorder | None:
    """Return what records on a device; None on a CPU, which has nothing to launch."""
    return CudaRecorder(device) if device.type == "cuda" else None


def why_launched(
    compute: ComputeConfig,
    *,
    ranks: int,
    parameters: int,
    is_rounded: bool,
    has_adapter: bool,
    drops_activations: bool,
    is_quantized: bool,
    has_experts: bool,
    has_window: bool,
) -> str:
    """Return why a policy's kernels are launched one by one, as a part of a sentence; nothing if they may be
    recorded."""
    reasons = {
        "learner.compute.cuda_graphs is never": compute.cuda_graphs == "never",
        f"the model is spread over {ranks} ranks": ranks > 1,
        "model.dtype is float32": not is_rounded,
        f"the model has more than {MOST_PARAMETERS:,} parameters": parameters > MOST_PARAMETERS,
        "the model has experts": has_experts,
        "the model's attention has a window": has_window,
        "an adapter is trained, which takes learner.compute.cuda_graphs=always": (
            has_adapter and compute.cuda_graphs != "always"
        ),
        "model.adapter.dropout is above 0": drops_activations,
        "model.adapter.quantize_base is set": is_quantized,
        f"learner.compute.recompute is {compute.recompute}": compute.recompute != "none",
        "learner.compute.offload_optimizer is true": compute.offload_optimizer,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
