"""One CUDA graph for every bucket of row shapes: rows are padded to a bucket and copied into its graph's inputs.

    row ─ padded ─► the bucket's shape ─ copied ─► the graph's inputs ─ replayed ─► gradients, in the graph's memory
    gradients ─ a second graph ─► fp32 sums, their norm, AdamW, weights rounded

Padding has no loss. A tree is padded by a run of its own, and by a run of one position whose path goes over that one,
so that both the positions and the places of the paths become multiples of a step; runs without any position fill up
their number. On a CPU only the padding is measured and compared.

N positions of a row, R runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from learner.backends.fsdp.row import FsdpRow
from learner.models.attention import LENGTH_STEP, PackedLayout
from learner.rows.batch import PackedBatch
from learner.rows.positions import Positions
from learner.rows.tree import PrefixTree

from .bare import BareStep
from .clock import timed, wait
from .rows import StepWork

POSITIONS, RUNS = 1024, 64
"""The multiples to which positions, places and runs are padded."""

ROWS = 4
"""Rows of one bucket that are replayed and compared."""


@dataclass(frozen=True)
class Inputs:
    """A padded row, and the gradient of its loss by its logprobs."""

    row: FsdpRow
    grad_N: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a graph reads."""
        layout = self.row.layout
        found = [self.row.token_ids_N, self.row.position_ids_N, self.row.next_ids_N, self.grad_N, layout.cu_seqlens]
        if layout.paths is not None:
            found += [layout.paths.cu_runs, layout.paths.index, layout.paths.copies.order, layout.paths.copies.offsets]
        return found

    @property
    def bucket(self) -> tuple[object, ...]:
        """Equal for rows that one graph computes."""
        layout = self.row.layout
        longest = -(-layout.max_seqlen // LENGTH_STEP)
        runs = 0 if layout.paths is None else -(-layout.paths.longest_run // LENGTH_STEP)
        return (longest, runs, *(tuple(tensor.shape) for tensor in self.tensors))


def padded(batch: PackedBatch, device: str) -> Inputs:
    """Return the row in its bucket's shape."""
    tree = None if batch.tree is None else _padded_tree(batch.tree)
    real = batch.num_positions
    padding = -real % POSITIONS if tree is None else tree.num_positions - real
    positions = Positions(tree, padding)
    varlen = device == "cuda"
    grad_N = F.pad(_pull(batch), (0, padding)).to(device)
    row = FsdpRow(
        token_ids_N=positions.here(batch.token_ids_T).to(device),
        position_ids_N=positions.position_ids(batch).to(device),
        next_ids_N=positions.after(batch.token_ids_T).to(device),
        has_previous_T=(batch.position_ids_T > 0).to(device),
        layout=_layout(positions, batch, varlen=varlen).moved(lambda tensor: tensor.to(device)),
        experts_NLK=None,
    )
    return Inputs(row, grad_N)


def _pull(batch: PackedBatch) -> torch.Tensor:
    """[N] 1 where a position predicts; the last one of a row without a tree predicts nothing."""
    ones_N = torch.ones(batch.num_positions)
    if batch.tree is None:
        ones_N[-1] = 0.0
    return ones_N


def _padded_tree(tree: PrefixTree) -> PrefixTree:
    """Return the tree with positions and places that are multiples of POSITIONS. The path of the last run, which is one
    position, goes over as much of the run before it as that takes."""
    count = 2 + (-tree.num_positions - 2) % POSITIONS
    while (extra := -(len(tree.paths_P) + count) % POSITIONS) > count - 1:
        count += POSITIONS
    whole = tree.padded(count - 1)
    end = whole.num_positions
    begun = torch.arange(tree.num_positions, tree.num_positions + extra)
    path = torch.cat([begun, torch.tensor([end])])
    return replace(
        whole,
        places_N=F.pad(whole.places_N, (0, 1)),
        cu_runs=F.pad(whole.cu_runs, (0, 1), value=end + 1),
        cu_paths=F.pad(whole.cu_paths, (0, 1), value=len(whole.paths_P) + len(path)),
        paths_P=torch.cat([whole.paths_P, path]),
    )


def _layout(positions: Positions, batch: PackedBatch, *, varlen: bool) -> PackedLayout:
    """Return the layout, with bounds of as many empty runs as fill up their number; the padding of a row without a tree
    is cut into sequences that are no longer than the others."""
    if positions.tree is None:
        longest = int(batch.cu_seqlens.diff().max())
        ends = torch.arange(batch.num_tokens + longest, batch.num_tokens + positions.padding + longest, longest)
        ends = ends.clamp(max=batch.num_tokens + positions.padding).to(torch.int32)
        bounds = torch.cat([batch.cu_seqlens.cpu(), ends])
        return PackedLayout.of(_filled(bounds) if varlen else bounds, varlen=varlen)
    layout = positions.layout(batch, varlen=varlen)
    if layout.paths is None:
        return layout
    paths = replace(layout.paths, cu_runs=_filled(layout.paths.cu_runs))
    return replace(layout, cu_seqlens=_filled(layout.cu_seqlens), paths=paths)


def _filled(bounds: torch.Tensor) -> torch.Tensor:
    """[R + 1] bounds, with further runs of no position at the end."""
    return F.pad(bounds, (0, -len(bounds) % RUNS), value=int(bounds[-1]))


def measured(step: BareStep, work: StepWork, vocabulary: int, device: str) -> dict[str, Any]:
    """Return milliseconds and agreement of eager, padded and replayed passes of several rows of one bucket, and of the
    whole step."""
    batches = [replace(work, seed=seed).batch(vocabulary) for seed in range(ROWS * 4)]
    given = [padded(batch, device) for batch in batches]
    same = [number for number, one in enumerate(given) if one.bucket == given[0].bucket][:ROWS]
    wanted = [_gradients(step, *_plain(step, batches[number])) for number in same]
    found: dict[str, Any] = {
        "positions": [batches[number].num_positions for number in same],
        "padded": len(given[0].grad_N),
        "of_this_bucket": f"{len(same)} of {len(given)} rows",
        "eager": timed(lambda: _gradients(step, *_plain(step, batches[0]))),
        "eager_padded": timed(lambda: _gradients(step, given[0].row, given[0].grad_N)),
        "padded_off": max(
            _off(_gradients(step, given[number].row, given[number].grad_N), one)
            for number, one in zip(same, wanted, strict=True)
        ),
    }
    if device == "cuda":
        found |= _graphs(step, [given[number] for number in same], wanted)
    return found


def _plain(step: BareStep, batch: PackedBatch) -> tuple[FsdpRow, torch.Tensor]:
    row = step.of(batch)
    return row, _pull(batch).to(row.token_ids_N.device)


def _gradients(step: BareStep, row: FsdpRow, grad_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(step.forward(row), step.parameters, grad_N)


def _graphs(step: BareStep, given: Sequence[Inputs], wanted: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    static = given[0]
    kept = [tensor.clone() for tensor in static.tensors]
    passes, gradients = _captured(lambda: _gradients(step, static.row, static.grad_N))
    passes.replay()  # capturing has computed nothing
    update = _Update(step, gradients)
    eager = update.eager()
    optimize, _ = _captured(update.step)
    update.reset()  # the steps before the capture were real

    def fill(tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(static.tensors, list(tensors))

    offs = []
    for one, expected in zip(given, wanted, strict=True):
        fill(kept if one is static else one.tensors)
        passes.replay()
        wait()
        offs.append(_off(gradients, expected))
    fill(kept)
    passes.replay()
    update.reset()
    optimize.replay()
    wait()

    def whole() -> None:
        fill(kept)
        passes.replay()
        optimize.replay()

    return {
        "replayed_off": max(offs),
        "update_off": _off(update.masters, eager),
        "fill": timed(lambda: fill(kept)),
        "passes": timed(passes.replay),
        "optimizer": timed(optimize.replay),
        "whole_step": timed(whole),
        "gib": round(torch.cuda.memory_reserved() / 2**30, 2),
    }


def _captured(call: Any) -> tuple[Any, Any]:
    """Return a graph of the call, and the tensors that it returns, which lie in the graph's memory."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


class _Update:
    """fp32 weights and what follows the gradients: their norm, clipping, AdamW in one kernel, rounding."""

    def __init__(self, step: BareStep, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients = list(gradients)
        self._halves = [one.detach() for one in step.parameters]
        self._first = [one.detach().float().clone() for one in step.parameters]
        self.masters = [one.clone() for one in self._first]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True, capturable=True)

    def step(self) -> None:
        sums = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_copy_(sums, self._gradients)
        norm = torch.stack(torch._foreach_norm(sums)).norm()
        torch._foreach_mul_(sums, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step()
        torch._foreach_copy_(self._halves, self.masters)

    def eager(self) -> list[torch.Tensor]:
        """Return the weights after one step, launched kernel by kernel."""
        self.step()
        after = [master.clone() for master in self.masters]
        self.reset()
        return after

    def reset(self) -> None:
        """Go back to the first weights, without moments."""
        torch._foreach_copy_(self.masters, self._first)
        torch._foreach_copy_(self._halves, self.masters)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()


def _off(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of a tensor, as a share of its norm."""
    return max(_shares(got, wanted))


def _shares(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Iterator[float]:
    for one, other in zip(got, wanted, strict=True):
        yield float((one.float() - other.float()).norm() / (other.float().norm() + 1e-12))
