"""Rows are padded to a few shapes, so that kernels which were recorded for one row compute the others of its shape.

    row            a b c d e f | g h | i                     N positions in R runs
    padded         a b c d e f | g h | i | - - - - - | |     further positions in runs of their own, and empty runs

Padding shares nothing and predicts nothing, so it changes no result and no gradient. It also fills up the places of a
tree's paths; those copies belong to no position. The smallest shapes are eight to an octave of positions, fewer of all
else.

Without a tree the runs are sequences, and there are no places.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headway.learner.models.attention import LENGTH_STEP, PackedLayout, is_long
from headway.learner.models.tree_attention import TokenCopies

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


STEP, PARTS = 256, 8
"""Positions are a multiple of `STEP` and of an eighth of the power of two below."""

PLACES_STEP, PLACES_PARTS = 1024, 4
RUNS_STEP, RUNS_PARTS = 64, 1

PICKED_PARTS = 16
"""Positions that go through the output head are a multiple of this part of all: rows of one task have like shares."""

SLACK = 1.25
"""A row may be padded to this many times the positions of the smallest shape, if kernels are recorded for that."""


@dataclass(frozen=True, kw_only=True)
class PaddedShape:
    """The sizes of a padded row. Rows of one shape differ in the contents of their tensors alone."""

    positions: int
    """N, of which at least one is padding."""
    runs: int
    """R, among them those of padding and empty ones."""
    longest: int
    """A bound of the tokens of a sequence or path."""
    places: int = 0
    """P, the tokens of all paths together."""
    longest_run: int = 0
    """A bound of the tokens of a run."""
    is_long: bool = False
    """See `PackedLayout`."""
    picked: int = 0
    """M, the positions that go through the output head; 0: all of them."""

    @classmethod
    def of(cls, batch: PackedBatch) -> "PaddedShape":
        """Returns the smallest shape that the batch fits into; it has at least one sequence."""
        positions = _rounded(batch.num_positions + 1, STEP, PARTS)
        part = positions // PICKED_PARTS
        picked = 0 if batch.picked is None else -(-len(batch.picked) // part) * part
        padding = positions - batch.num_positions
        added = -(-padding // LENGTH_STEP)
        tree = batch.tree
        if tree is None:
            runs = _rounded(batch.num_sequences + added, RUNS_STEP, RUNS_PARTS)
            return cls(
                positions=positions,
                runs=runs,
                longest=_bound(batch.cu_seqlens),
                is_long=is_long(batch.cu_seqlens),
                picked=picked,
            )
        return cls(
            positions=positions,
            runs=_rounded(len(tree.cu_runs) - 1 + added, RUNS_STEP, RUNS_PARTS),
            longest=_bound(tree.cu_paths),
            places=_rounded(len(tree.paths_P) + padding, PLACES_STEP, PLACES_PARTS),
            longest_run=_bound(tree.cu_runs),
            is_long=is_long(tree.cu_paths),
            picked=picked,
        )

    def holds(self, batch: PackedBatch, least: "PaddedShape") -> bool:
        """Returns whether a batch whose smallest shape is `least` may be padded to this one."""
        padding = self.positions - batch.num_positions
        if padding < 1 or self.positions > SLACK * least.positions or self.is_long is not least.is_long:
            return False
        if self.longest < least.longest or self.longest_run < least.longest_run:
            return False
        if not least.picked <= self.picked <= SLACK * least.picked:
            return False
        added, tree = -(-padding // LENGTH_STEP), batch.tree
        if tree is None:
            return not self.places and batch.num_sequences + added <= self.runs
        filled = self.places - padding - len(tree.paths_P)
        return len(tree.cu_runs) - 1 + added <= self.runs and 0 <= filled <= self._padding_places

    @property
    def _padding_places(self) -> int:
        """The most places of paths that are padding of no position."""
        return max(PLACES_STEP, self.places // 2)

    def picked_of(self, batch: PackedBatch) -> torch.Tensor | None:
        """[M] the positions of a batch of this shape that go through the output head, the last one, which is padding,
        again and again; None if all of them do."""
        found_M = batch.picked
        if found_M is None or not self.picked:
            return None
        return F.pad(found_M, (0, self.picked - len(found_M)), value=self.positions - 1)

    def positions_of(self, batch: PackedBatch) -> Positions:
        """Returns the positions of a batch of this shape. A run of padding is no longer than the bounds."""
        padding, tree = self.positions - batch.num_positions, batch.tree
        if tree is not None:
            for start in range(0, padding, LENGTH_STEP):
                tree = tree.padded(min(LENGTH_STEP, padding - start))
        return Positions(tree, padding)

    def layout(self, positions: Positions, batch: PackedBatch) -> PackedLayout:
        """Returns the layout of a batch of this shape, in these positions, for the variable-length kernel; on the
        CPU."""
        tree = positions.tree
        if tree is None:
            end = batch.num_tokens + positions.padding
            ends = torch.arange(batch.num_tokens + LENGTH_STEP, end + LENGTH_STEP, LENGTH_STEP).clamp(max=end)
            bounds = torch.cat([batch.cu_seqlens.cpu(), ends.to(torch.int32)])
            return PackedLayout(
                cu_seqlens=self._filled(bounds), max_seqlen=self.longest, buckets=None, is_long=self.is_long
            )
        layout = PackedLayout.of_paths(tree.cu_runs, tree.cu_paths, tree.paths_P, varlen=True)
        assert layout.paths is not None
        paths = replace(
            layout.paths,
            cu_runs=self._filled(layout.paths.cu_runs),
            longest_run=self.longest_run,
            index=F.pad(layout.paths.index, (0, self.places - len(layout.paths.index))),
            copies=self._copies(layout.paths.copies),
        )
        bounds = self._filled(layout.cu_seqlens)
        return replace(layout, cu_seqlens=bounds, max_seqlen=self.longest, paths=paths, is_long=self.is_long)

    def _filled(self, bounds: torch.Tensor) -> torch.Tensor:
        """[R + 1] bounds, with further runs of no position at the end."""
        return F.pad(bounds, (0, self.runs + 1 - len(bounds)), value=int(bounds[-1]))

    def _copies(self, copies: TokenCopies) -> TokenCopies:
        """Returns the copies with those of padding, each the only one of a position that the row does not have: many
        copies of one position would be summed one after another."""
        real = len(copies.order)
        assert self.places - real <= self._padding_places
        further = torch.arange(real, real + self._padding_places).clamp(max=self.places)
        return TokenCopies(F.pad(copies.order, (0, self.places - real)), torch.cat([copies.offsets, further]))


def _rounded(count: int, step: int, parts: int) -> int:
    """Returns the next multiple of `step`, or of a part of the power of two below, whichever is larger."""
    step = max(step, (1 << (count.bit_length() - 1)) // parts)
    return -(-count // step) * step


def _bound(bounds: torch.Tensor) -> int:
    """Returns the power of two above the longest run, at least the kernel's own step."""
    return 1 << (max(LENGTH_STEP, int(bounds.diff().max())) - 1).bit_length()
