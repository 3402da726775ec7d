"""The positions of a row as a backend computes them: those of a batch's tokens, or of its prefix tree, and padding.

T tokens of the batch, N positions with padding. Without a tree position t is token t.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.learner.models.attention import PackedLayout

from .batch import PackedBatch
from .tree import PrefixTree


@dataclass(frozen=True)
class Positions:
    """Turns values of tokens into values of positions. The padding is a sequence of its own at the row's end."""

    tree: PrefixTree | None
    """The padded tree."""
    padding: int
    """The number of positions that stand for no token."""

    @classmethod
    def of(cls, batch: PackedBatch, multiple: int = 1, length: int | None = None) -> "Positions":
        """Returns the positions of a batch, `length` of them, or the next multiple of `multiple`."""
        real = batch.num_positions
        padding = -real % multiple if length is None else length - real
        return cls(None if batch.tree is None else batch.tree.padded(padding), padding)

    def here(self, values_T: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """[N, ...] the values of the tokens at the positions; `fill` for padding."""
        if self.tree is not None:
            return self._filled(values_T[self.tree.places_N.to(values_T.device)], fill)
        return F.pad(values_T, (*[0, 0] * (values_T.dim() - 1), 0, self.padding), value=fill)

    def after(self, values_T: torch.Tensor) -> torch.Tensor:
        """[N, ...] the values of the tokens that the positions predict; of no meaning where there is none."""
        if self.tree is None:
            return self.here(values_T).roll(-1, 0)
        return values_T[self.tree.places_N.to(values_T.device) + 1]

    def position_ids(self, batch: PackedBatch) -> torch.Tensor:
        """[N] int64, restarting at 0 with every sequence; 0 for all padding, which may be longer than a model's context
        and must not move frequencies that depend on the longest sequence."""
        return self.here(batch.position_ids_T)

    def shares(self, batch: PackedBatch) -> torch.Tensor | None:
        """[N] int64 the number of sequences for which each position is computed, 0 for padding; None without a tree:
        then it is one."""
        if self.tree is None:
            return None
        predictors = self.tree.predictor_T[batch.position_ids_T.cpu() > 0]
        return torch.bincount(predictors, minlength=self.tree.num_positions)

    def layout(self, batch: PackedBatch, *, varlen: bool) -> PackedLayout:
        """Returns the bounds of sequences or paths, on the CPU. `varlen`: see `PackedLayout`."""
        tree = self.tree
        if tree is not None:
            return PackedLayout.of_paths(tree.cu_runs, tree.cu_paths, tree.paths_P, varlen=varlen)
        ends = torch.full((min(self.padding, 1),), batch.num_tokens + self.padding, dtype=torch.int32)
        return PackedLayout.of(torch.cat([batch.cu_seqlens.cpu(), ends]), varlen=varlen)

    def _filled(self, values_N: torch.Tensor, fill: int) -> torch.Tensor:
        if self.padding and fill:
            values_N[-self.padding :] = fill
        return values_N
