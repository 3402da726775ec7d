"""Rows in which sequences share their beginnings: attention along paths, each of which ends in a run of its own.

    row      a b c d e f | g h | i           runs of the row, computed once
    paths    a b c d e f   a b c d g h       the keys of each run: what its sequence shares, then the run itself
             a b c d g i

The queries of a run are the last tokens of its path, so that causality is that of a sequence. A key that several paths
share is copied into each of them, and its gradient is the sum over its copies.

Shapes: N tokens of the row, R runs, P tokens of all paths together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenCopies:
    """Copies of the tokens of a row, each token at least once. They may lie among others, which are padding."""

    order: torch.Tensor
    """[P] int64, the place of every copy; the copies of the row's first token first."""
    offsets: torch.Tensor
    """[N] int64, where in `order` the copies of each token begin. Further entries stand for no token: their copies are
    padding, too."""

    @classmethod
    def of(cls, cu_runs: torch.Tensor, cu_paths: torch.Tensor, paths_P: torch.Tensor) -> "TokenCopies":
        """Returns where the tokens of a row lie in its paths, as `Paths` lays them out. O(P).

        A token is in the path of its own run and in those of the runs that follow, up to the last one that shares it.
        NumPy computes it: torch would divide each operation among its threads, which wait for each other for longer
        than it takes wherever other processes are at work.
        """
        bounds_R, own_N, runs_N = cu_paths.numpy(), _end_run_places(cu_runs, cu_paths), _runs(cu_runs)
        counts_N = np.bincount(paths_P.numpy(), minlength=len(own_N))
        offsets_N = counts_N.cumsum() - counts_N
        later_P = np.arange(len(paths_P)) - offsets_N.repeat(counts_N)
        depths_P = (own_N - bounds_R[runs_N]).repeat(counts_N)
        order_P = bounds_R[runs_N.repeat(counts_N) + later_P] + depths_P
        return cls(torch.from_numpy(order_P), torch.from_numpy(offsets_N))

    def at(self, places_P: torch.Tensor) -> "TokenCopies":
        """Returns the copies where place p of the paths lies at `places_P[p]`."""
        return TokenCopies(places_P[self.order], self.offsets)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TokenCopies":
        return TokenCopies(move(self.order), move(self.offsets))


@dataclass(frozen=True)
class Paths:
    """The runs of a row and what their queries attend to, for the variable-length kernel."""

    cu_runs: torch.Tensor
    """[R + 1] int32, where each run begins; the last entry is N."""
    longest_run: int
    index: torch.Tensor
    """[P] int64, the token of the row at every place of the paths, one path after another."""
    copies: TokenCopies

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Paths":
        return Paths(move(self.cu_runs), self.longest_run, move(self.index), self.copies.moved(move))


class _Copied(torch.autograd.Function):
    """Copies rows. The gradient of a row is the sum over its copies, always added in the same order."""

    @staticmethod
    def forward(
        ctx: Any, rows_N: torch.Tensor, index: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order, offsets)
        ctx.num_rows = len(rows_N)
        return rows_N.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        order, offsets = ctx.saved_tensors
        flat = gradients[0].reshape(len(gradients[0]), -1)
        summed_N = F.embedding_bag(order, flat, offsets, mode="sum")[: ctx.num_rows]
        return summed_N.view(-1, *gradients[0].shape[1:]), None, None, None


def copied(rows_N: torch.Tensor, index: torch.Tensor, copies: TokenCopies) -> torch.Tensor:
    """[len(index), ...] the rows at `index`. Entries of it that are no copy are padding, whose gradient is dropped."""
    found: torch.Tensor = _Copied.apply(rows_N, index, copies.order, copies.offsets)  # type: ignore[no-untyped-call]
    return found


def end_run_places(cu_runs: torch.Tensor, cu_paths: torch.Tensor) -> torch.Tensor:
    """[N] int64, the place of every token of the row in the path of its own run."""
    return torch.from_numpy(_end_run_places(cu_runs, cu_paths))


def _end_run_places(cu_runs: torch.Tensor, cu_paths: torch.Tensor) -> NDArray[np.int64]:
    ends = (cu_paths[1:] - cu_runs[1:]).numpy().astype(np.int64)
    return np.arange(int(cu_runs[-1])) + ends[_runs(cu_runs)]


def _runs(cu_runs: torch.Tensor) -> NDArray[np.int64]:
    """[N] the run of every token of the row."""
    return np.arange(len(cu_runs) - 1).repeat(np.diff(cu_runs.numpy()))
