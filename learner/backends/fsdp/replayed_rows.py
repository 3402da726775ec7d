"""A policy's passes over rows are recorded once for each shape, and replayed for all other rows of that shape.

    row ─ padded ─► copied into the recorded row ─ forward graph ─► results ─ loss, eager ─► gradient ─ backward graph
                                                                                              └► added to fp32 sums

Launching a thousand kernels takes a process longer than a GPU takes to run them for a small model; replaying takes a
millisecond. A shape's first row is launched kernel by kernel, so that rare shapes cost nothing, the second one is
recorded. A row takes a shape somewhat larger than its own if that one is known, until its own has come often. All
graphs use one pool of memory, so only the last row that went forward can go backward.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.learner.rows.batch import PackedBatch
from headway.learner.rows.padding import PaddedShape

from .policy import Policy
from .recording import PassRecorder
from .rounded import RoundedWeights
from .row import FsdpRow

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


class ReplayedRows:
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
        found_N: torch.Tensor = _Replayed.apply(self._pull, self)  # type: ignore[no-untyped-call]
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


class _Replayed(torch.autograd.Function):
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
