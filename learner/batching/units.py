"""Units of sequences that a loss compares, such as the two responses of a pair, packed whole into one micro-batch.

A row holds its units one after another, and each unit's sequences in their order. The plan is that of `packing`, for
which a unit counts as one sequence of all its tokens, and units that share tokens as one sequence of those that are
computed (`clusters`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing, clusters_of
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.batching.packing import PackableSequence, concatenate

Unit = Sequence[PackableSequence]
"""Sequences that stay together."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One micro-batch of whole units."""

    batch: PackedBatch
    units: tuple[int, ...]
    """The indices of its units among those that were packed, in the row's order."""


def pack_units(
    units: Sequence[Unit],
    *,
    replica: int,
    replicas: int,
    micro_batch_tokens: int,
    cost: CostModel = DEFAULT_COST,
    prefix_sharing: PrefixSharing = "never",
) -> list[Row]:
    """Returns this replica's rows, at least one, some perhaps empty. All ranks call it with the same units in the same
    order. A unit that is longer than `micro_batch_tokens` gets a row of its own."""
    clusters, planned = clusters_of(units, replicas, micro_batch_tokens, cost, prefix_sharing)
    rows = []
    for chosen in planned[replica]:
        members = tuple(unit for index in chosen for unit in clusters[index].units)
        is_tree = any(clusters[index].is_shared for index in chosen)
        sequences = [sequence for unit in members for sequence in units[unit]]
        rows.append(Row(batch=concatenate(sequences, is_tree=is_tree), units=members))
    return rows


def response_values(values_T: torch.Tensor, batch: PackedBatch, unit: Unit, first: int) -> list[NDArray[np.float32]]:
    """Returns the values of each response [R] of a unit whose first sequence is sequence `first` of the row."""
    starts = batch.cu_seqlens.tolist()
    found = []
    for number, sequence in enumerate(unit, first):
        values_R = values_T[starts[number] + sequence.prompt_length : starts[number + 1]]
        found.append(values_R.to("cpu", torch.float32).numpy())
    return found


def row_values(units: Sequence[Unit], values: Sequence[Sequence[NDArray[np.float32]]]) -> torch.Tensor:
    """[T] the values of all responses at their places in a row of these units, 0 over prompts. `values` holds [R]
    values for each sequence of each unit."""
    parts: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    for unit, of_unit in zip(units, values, strict=True):
        for sequence, values_R in zip(unit, of_unit, strict=True):
            parts += [np.zeros(sequence.prompt_length, np.float32), values_R]
    return torch.from_numpy(np.concatenate(parts))
