"""A micro-batch costs a fixed part, a part for every token, and a part for every pair of tokens of a sequence.

A sequence of L tokens costs a * L in linear layers and b * L^2 in attention; a and b are counted from the model's
shapes, or measured.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from learner.models.shape import ModelShape

    from .tree import Size

FLOPS_PER_BYTE = 200
"""The operations that a GPU does while it reads one byte of its memory: an H200 989 TFLOP/s in bfloat16 at 4.8 TB/s."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs in one unit for all three parts: FLOPs, seconds, or tokens' worth.

    The defaults are a model of width 4096 with as wide attention: 24 W^2 FLOPs a token and layer, and 2 W a pair.
    """

    per_token: float = 1.0
    per_pair: float = 1 / 49152
    """The factor of L^2, with the causal half in it."""
    per_micro_batch: float = 0.0

    def of_sequences(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Returns the cost [S] of each sequence alone, without the fixed part."""
        lengths_S = np.asarray(lengths, np.float64)
        return lengths_S * (self.per_token + self.per_pair * lengths_S)

    def of_tree(self, size: "Size") -> float:
        """Returns the cost of sequences that are computed as one tree, without the fixed part."""
        return self.per_token * size.positions + self.per_pair * size.pairs

    def of_micro_batch(self, lengths: ArrayLike) -> float:
        """Returns the cost of sequences that are computed together."""
        return self.per_micro_batch + float(self.of_sequences(lengths).sum())

    @classmethod
    def of_model(cls, shape: "ModelShape") -> "CostModel":
        """Returns costs in FLOPs of a forward pass (a training step takes three times that of each part).

        A token costs 2 for each weight but those of the embedding and of experts that were not chosen. A pair costs
        2 * 2 for each head and head width, for scores and values, and half of that because of causality. A micro-batch
        costs one reading of all weights in bfloat16.
        """
        return cls(
            per_token=2.0 * shape.active_weights,
            per_pair=2.0 * shape.layers * shape.heads * shape.head_width,
            per_micro_batch=2.0 * shape.num_parameters * FLOPS_PER_BYTE,
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
