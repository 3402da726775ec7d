"""A micro-batch costs a fixed part, a part for every token, and a part for every pair of tokens of a sequence.

A sequence of L tokens costs a * L in linear layers and b * L^2 in attention; a and b are counted from the model's
shapes, or measured. Where a device computes faster than the process launches its kernels, a micro-batch takes as long
as the launches. One with shared tokens has more of these, and copies keys and values.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from headway.learner.batching.tree import TreeSize
    from headway.learner.models.shape import ModelShape

FLOPS_PER_BYTE = 200
"""The operations that a GPU does while it reads one byte of its memory: an H200 989 TFLOP/s in bfloat16 at 4.8 TB/s."""

PASSES = 3
"""The forward passes that a forward and backward pass costs as much as."""

GPU_FLOPS = 160e12
"""The operations in a second that a small model's forward and backward pass reached on an H100: 77.2 ms for 15,361
tokens of SmolLM2-135M's shape, replayed as CUDA graphs. This and the next three figures are
measured."""

LAUNCH_S, TREE_LAUNCH_S = 98e-3 / 30, 106e-3 / 30
"""Seconds in which a process launches the forward and backward pass of one layer, without and with shared tokens: the
same shape has 30 layers."""

COPY_S = 7.5e-3 / 30 / 15_233 / 384
"""Seconds that one number of a key or value costs for which a path has a copy, forth and back: 8,177 positions took 7.5
ms longer than as many tokens that share nothing. Their paths have 15,233 tokens, of 384 numbers in each layer."""

CPU_FLOPS = 25e9
"""The operations in a second that one core reached in forward and backward passes of models of width 64. This and the
next three figures are measured on rows of 146 to 14,764 tokens."""

CPU_ROW_S, CPU_TREE_S = 5.5e-3, 0.3e-3
"""Seconds that each layer takes for a row of hardly any tokens, and longer for one that shares tokens. A core computes
nothing meanwhile, so they add up with the rest."""

CPU_COPY_S = 15e-9
"""Seconds of one core that one number of a key or value costs for which a path has a copy, forth and back."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs in one unit for all three parts: FLOPs, seconds, or tokens' worth.

    The defaults are a model of width 4096 with as wide attention: 24 W^2 FLOPs a token and layer, and 2 W a pair.
    """

    per_token: float = 1.0
    per_pair: float = 1 / 49152
    """The factor of L^2, with the causal half in it."""
    per_micro_batch: float = 0.0
    per_copy: float = 0.0
    """For each token of a tree's paths, whose key and value are copied in every layer."""
    per_tree: float = 0.0
    """A part of each micro-batch that shares tokens, besides the fixed one."""
    least: float = 0.0
    """The least cost of a micro-batch's sequences, in which the process launches its kernels. A device that has
    computed sooner waits; one that has not, computes while the process launches."""
    least_of_tree: float = 0.0
    """The same of a micro-batch that shares tokens."""
    repeats_queries: bool = False
    """Whether attention computes shared queries again in each sequence (`models.attention.bucketed_attention`)."""

    def of_sequences(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Returns the cost [S] of each sequence alone, without the fixed part."""
        lengths_S = np.asarray(lengths, np.float64)
        return lengths_S * (self.per_token + self.per_pair * lengths_S)

    def of_tree(self, size: "TreeSize") -> float:
        """Returns the cost of sequences that are computed as one tree, without the fixed part."""
        pairs = size.path_pairs if self.repeats_queries else size.pairs
        return self.per_token * size.positions + self.per_pair * pairs + self.per_copy * size.path_tokens

    def of_micro_batch(self, lengths: ArrayLike) -> float:
        """Returns the cost of sequences that are computed together and share nothing."""
        return self.of_row(float(self.of_sequences(lengths).sum()), is_tree=False)

    def of_row(self, cost: float, *, is_tree: bool) -> float:
        """Returns the cost of a micro-batch whose sequences and trees cost `cost`."""
        if is_tree:
            return self.per_micro_batch + self.per_tree + max(cost, self.least_of_tree)
        return self.per_micro_batch + max(cost, self.least)

    @classmethod
    def of_model(cls, shape: "ModelShape", device: str = "cuda", *, is_replayed: bool = False) -> "CostModel":
        """Returns costs in FLOPs of a forward pass (a training step takes three times that of each part).

        A token costs 2 for each weight but those of the embedding and of experts that were not chosen. A pair costs
        2 * 2 for each head and head width, for scores and values, and half of that because of causality. On a GPU a
        micro-batch costs one reading of all weights in bfloat16, and at least its launches, unless `is_replayed`: its
        kernels were recorded.
        """
        per_token = 2.0 * shape.active_weights
        per_pair = 2.0 * shape.layers * shape.heads * shape.head_width
        copied = 2.0 * shape.layers * shape.key_value_heads * shape.head_width
        if device == "cpu":
            return cls(
                per_token=per_token,
                per_pair=per_pair,
                per_micro_batch=CPU_ROW_S * CPU_FLOPS / PASSES * shape.layers,
                per_tree=CPU_TREE_S * CPU_FLOPS / PASSES * shape.layers,
                per_copy=CPU_COPY_S * CPU_FLOPS / PASSES * copied,
                repeats_queries=True,
            )
        return cls(
            per_token=per_token,
            per_pair=per_pair,
            per_micro_batch=2.0 * shape.num_parameters * FLOPS_PER_BYTE,
            per_copy=COPY_S * GPU_FLOPS / PASSES * copied,
            least=0.0 if is_replayed else LAUNCH_S * GPU_FLOPS / PASSES * shape.layers,
            least_of_tree=0.0 if is_replayed else TREE_LAUNCH_S * GPU_FLOPS / PASSES * shape.layers,
        )

    @classmethod
    def measured(cls, lengths: Sequence[Sequence[int]], seconds: Sequence[float]) -> "CostModel":
        """Returns the non-negative least-squares fit to micro-batches, given their sequences' lengths and durations.

        Raises ValueError if there is nothing to fit. Parts that the micro-batches do not tell apart come out as one
        of those that explain them.
        """
        if not lengths or len(lengths) != len(seconds):
            raise ValueError(f"{len(lengths)} micro-batches and {len(seconds)} times: give one for each, at least one.")
        counts = [np.asarray(one, np.float64) for one in lengths]
        features = np.array([[1.0, one.sum(), (one**2).sum()] for one in counts])
        fixed, token, pair = _non_negative_fit(features, np.asarray(seconds, np.float64))
        return cls(per_token=token, per_pair=pair, per_micro_batch=fixed)


DEFAULT_COST = CostModel()
"""The cost model of callers that know no model: it divides work well for all models that are not far from it."""


def _non_negative_fit(features: NDArray[np.float64], targets: NDArray[np.float64]) -> list[float]:
    """Solves least squares with coefficients >= 0 exactly: the best of the fits on every subset of three columns."""
    scale = features.max(axis=0).clip(min=1.0)
    best, least = np.zeros(features.shape[1]), float(targets @ targets)
    for chosen in itertools.product((False, True), repeat=features.shape[1]):
        columns = (features / scale)[:, list(chosen)]
        solution = np.linalg.lstsq(columns, targets, rcond=None)[0] if any(chosen) else np.zeros(0)
        error = float(((columns @ solution - targets) ** 2).sum())
        if error < least and (solution >= 0).all():
            best, least = np.zeros(features.shape[1]), error
            best[list(chosen)] = solution
    return [float(coefficient) for coefficient in best / scale]
