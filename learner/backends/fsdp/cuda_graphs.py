"""Launches of kernels are recorded as CUDA graphs, all in one pool of memory.

`CudaGraphReplay` records a policy's passes over rows once for each shape, and replays them for all other rows of it.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.padding import PaddedShape
from headway.learner.config import ComputeConfig

from .optimizer import RoundedWeights
from .policy import Policy
from .row import FsdpRow

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


log = logging.getLogger(__name__)

MOST_RECORDED = 24
"""The number of shapes that are recorded; rows of all others are launched. No graph is dropped while others are used:
with it torch frees workspaces of its stream, from which the others read."""

MOST_SEEN = 512
"""The number of shapes that are remembered until they come again."""

OFTEN = 8
"""A shape that has come so often is recorded, though its rows fit into larger ones that are."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """All that the passes of one recording have in common."""

    shape: PaddedShape
    temperature: float
    confident: bool
    has_gradient: bool

    def holds(self, batch: PackedBatch, least: "_Kind") -> bool:
        """Return whether a batch of the kind `least` may be computed as one of this kind."""
        is_alike = self == replace(least, shape=self.shape)
        return is_alike and self.shape.holds(batch, least.shape)


class CudaGraphReplay:
    """A policy's forward and backward passes on one rank, whose weights lie in `weights`."""

    def __init__(self, policy: Policy, weights: RoundedWeights, recorder: PassRecorder, *, picks: bool = False) -> None:
        """`picks`: trained tokens alone go through the output head, where a batch allows it."""
        self._policy = policy
        self._picks = picks
        self._weights = weights
        self._recorder: PassRecorder | None = recorder
        self._seen: Counter[_Kind] = Counter()
        self._recorded: dict[_Kind, _Passes] = {}
        self._launched: set[_Kind] = set()
        self._pool = _Pool()

    def __call__(self, batch: PackedBatch, temperature: float, top: float = 0) -> torch.Tensor:
        """[T, ...] what the policy's forward pass returns; the weights must be in place."""
        if self._recorder is None or top or not _is_plain(batch):
            found_T: torch.Tensor = self._policy(batch, temperature, top)
            return found_T
        if not self._picks:
            batch = replace(batch, only_trained=False)
        least = _Kind(
            shape=PaddedShape.of(batch),
            temperature=temperature,
            confident=batch.wants_confidence,
            has_gradient=torch.is_grad_enabled(),
        )
        kind, is_known = self._chosen(batch, least)
        row = self._policy.padded_row(batch, kind.shape)
        passes = self._passes(kind, row) if is_known else None
        if passes is None:
            self._launched.add(kind)
            return row.at_next_token(self._policy.token_values(row, temperature, confident=kind.confident))
        return row.at_next_token(passes(row))

    @property
    def num_recorded(self) -> int:
        """The number of shapes that have graphs."""
        return len(self._recorded)

    def stop(self, reason: str) -> None:
        """Drop all graphs and record no more, as their memory is about to be freed, or is needed."""
        if self._recorder is not None:
            log.info("kernels are launched one by one from now on, not replayed as CUDA graphs: %s", reason)
        self._recorder = None
        self._recorded.clear()
        self._seen.clear()
        self._launched.clear()

    def _chosen(self, batch: PackedBatch, least: _Kind) -> tuple[_Kind, bool]:
        """Return the kind as which a batch is computed, and whether a row of that kind has come before."""
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
            self._launched.clear()
        known = [[*self._recorded], [*self._seen]]
        self._seen[least] += 1
        is_full = len(self._recorded) >= MOST_RECORDED
        if least in self._recorded or (self._seen[least] > OFTEN and not is_full):
            return least, True
        for kinds in known:
            fitting = [kind for kind in kinds if kind.holds(batch, least)]
            if fitting:
                return min(fitting, key=lambda kind: kind.shape.positions), True
        return least, False

    def _passes(self, kind: _Kind, row: FsdpRow) -> "_Passes | None":
        found = self._recorded.get(kind)
        if found is None and len(self._recorded) < MOST_RECORDED:
            return self._record(kind, row)
        return found

    def _record(self, kind: _Kind, row: FsdpRow) -> "_Passes | None":
        """Record a row's passes. Where torch or the device's memory does not allow it, no row is recorded any more."""
        assert self._recorder is not None
        try:
            is_new = kind not in self._launched  # its rows have taken larger shapes
            passes = _Passes(self._policy, self._weights, self._recorder, kind, row, self._pool, is_new=is_new)
        except Exception as error:  # whatever a kernel's library raises: the row is launched instead
            log.debug("a recording failed", exc_info=True)
            self.stop(f"recording failed ({type(error).__name__}: {error})")
            return None
        if not self._recorder.has_room():
            del passes
            self.stop("they leave too little of the device's memory free")
            return None
        self._recorded[kind] = passes
        return passes


class _Pool:
    """The state of the memory that all recordings of one model share."""

    def __init__(self) -> None:
        self.forwards = 0
        """The number of forward passes that were replayed."""
        self.warm: set[bool] = set()
        """Whether a recording with a gradient, or without one, has been warmed up."""


class _Passes:
    """The recorded passes of rows of one kind. The recorded row is the memory from which they read."""

    def __init__(
        self,
        policy: Policy,
        weights: RoundedWeights,
        recorder: PassRecorder,
        kind: _Kind,
        row: FsdpRow,
        pool: _Pool,
        *,
        is_new: bool,
    ) -> None:
        """`is_new`: no row of this kind has been computed, so that kernels may be left to compile or to load."""
        self.pool = pool
        self._weights = weights
        self._row = row
        self._found_N: torch.Tensor | None = None
        self._whole_N: torch.Tensor | None = None
        """The same with its graph of operations, until it has gone backward: it would keep alive what they hold."""
        self._reached: set[int] = set()
        size = (kind.shape.positions, 3) if kind.confident else (kind.shape.positions,)
        exact = torch.promote_types(weights.copies[0].dtype, torch.float32)
        self._grad_N = torch.zeros(size if kind.has_gradient else 0, dtype=exact, device=row.token_ids_N.device)

        def forward() -> None:
            with torch.set_grad_enabled(kind.has_gradient):
                self._whole_N = policy.token_values(row, kind.temperature, confident=kind.confident)
            self._found_N = self._whole_N.detach()

        def gradients() -> tuple[torch.Tensor | None, ...]:
            assert self._whole_N is not None
            whole_N, self._whole_N = self._whole_N, None
            found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                whole_N, weights.copies, self._grad_N, allow_unused=True
            )
            return found

        def backward() -> None:
            self._reached = weights.add(gradients())

        self._has_gradient = kind.has_gradient
        if is_new or kind.has_gradient not in pool.warm:
            recorder.warm_up(forward)
            if kind.has_gradient:
                recorder.warm_up(gradients)
            pool.warm.add(kind.has_gradient)
        self._forward: Callable[[], None] = recorder.record(forward)
        self._backward: Callable[[], None] | None = recorder.record(backward) if kind.has_gradient else None
        self._pull = torch.zeros((), requires_grad=True)

    def __call__(self, row: FsdpRow) -> torch.Tensor:
        """[N, ...] results of a row of this kind; with a gradient, if the kind has one."""
        if row is not self._row:
            torch._foreach_copy_(self._row.tensors, row.tensors)
        if not self._has_gradient:
            return self.forward()
        found_N: torch.Tensor = _GraphReplay.apply(self._pull, self)  # type: ignore[no-untyped-call]
        return found_N

    def forward(self) -> torch.Tensor:
        """[N, ...] results in memory of their own."""
        self.pool.forwards += 1
        self._forward()
        assert self._found_N is not None
        return self._found_N.clone()

    def backward(self, grad_N: torch.Tensor) -> None:
        """Add the gradients of the last forward pass to the sums."""
        assert self._backward is not None
        self._grad_N.copy_(grad_N)
        self._backward()
        self._weights.reach(self._reached)


class _GraphReplay(torch.autograd.Function):
    """Replayed passes as one operation: autograd sees a number that wants a gradient, and none of the weights."""

    @staticmethod
    def forward(ctx: Any, pull: torch.Tensor, passes: _Passes) -> torch.Tensor:
        found_N = passes.forward()
        ctx.passes, ctx.forwards = passes, passes.pool.forwards
        return found_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        assert ctx.forwards == ctx.passes.pool.forwards, "another row went forward since"
        ctx.passes.backward(gradients[0])
        return None, None


def _is_plain(batch: PackedBatch) -> bool:
    """Return whether the batch has tokens, and wants nothing but logprobs of them, perhaps with the confidence."""
    return batch.num_tokens > 0 and batch.experts_TLK is None and batch.candidates_TC is None
