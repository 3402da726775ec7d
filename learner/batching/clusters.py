"""Decides which units of sequences are computed together because they share tokens.

Samples of a group share at least their prompt, so they belong into one micro-batch; but what one replica computes for
all of them may keep the others waiting. So groups are also planned in halves, quarters and so on, and the plan is kept
that takes the least time by the cost model. All units of a cluster have one prompt. What else they share, also with
other clusters of a row, the tree finds.

A unit are sequences that a loss compares, such as the two responses of a pair, or that it takes together, as all rows
of an agent's rollout: a row holds its units one after another, and each unit's sequences in their order. The plan is
that of `packing`, for which a unit counts as one sequence of all its tokens, and units that share tokens as one
sequence of those that are computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import PackedBatch
from .cost import DEFAULT_COST, CostModel
from .packing import PackableSequence, Plan, concatenate, labels, plan
from .tree import Labels, TreeSize, size_of

PrefixSharing: TypeAlias = Literal["auto", "always", "never"]

LEAST_SAVED = 0.1
"""The least share of tokens that a cluster must save to be worth its copies of keys and values, and of the time that a
plan must save by the cost model, which is not exact."""

KEYS_OF_A_TOKEN = 16
"""The copies of a token's key and value in one layer that take as much memory as all activations of a token there. With
grouped heads it is 25 (SmolLM2) to 70 (Qwen3-30B-A3B), without them 11."""


@dataclass(frozen=True)
class UnitCluster:
    """Units that lie in one micro-batch."""

    units: tuple[int, ...]
    room: int
    """The tokens of a micro-batch's budget that it takes."""
    cost: float
    is_shared: bool
    """Whether its shared tokens are computed once."""


def clusters_of(
    units: Sequence[Sequence[PackableSequence]],
    replicas: int,
    micro_batch_tokens: int,
    cost: CostModel,
    prefix_sharing: PrefixSharing,
) -> tuple[list[UnitCluster], Plan]:
    """Returns clusters that hold every unit once, and the plan of them. Every rank gets the same.

    auto: the plan that takes the least time, which shares tokens only if that saves a tenth of it; always: of those
    that share tokens; never: each unit is a cluster.
    """
    lengths = [sum(len(sequence.token_ids) for sequence in unit) for unit in units]
    costs = cost.of_sequences(lengths).tolist()
    alone = [UnitCluster((index,), lengths[index], costs[index], is_shared=False) for index in range(len(units))]
    if prefix_sharing != "never":
        alone = [_within(unit, units[unit.units[0]], micro_batch_tokens, cost) for unit in alone]
    separate = (alone, _planned(alone, replicas, micro_batch_tokens))
    if prefix_sharing == "never" or not units:
        return separate
    shared = [
        (clusters, _planned(clusters, replicas, micro_batch_tokens))
        for clusters in _divided(units, alone, replicas, micro_batch_tokens, cost, prefix_sharing)
    ]
    if not shared:
        return separate
    quickest = min(shared, key=lambda one: _duration(one[0], one[1], cost))
    is_quicker = _duration(*quickest, cost) < (1 - LEAST_SAVED) * _duration(*separate, cost)
    return quickest if is_quicker or prefix_sharing == "always" else separate


def _within(alone: UnitCluster, unit: Sequence[PackableSequence], budget: int, cost: CostModel) -> UnitCluster:
    """Returns the cluster of a unit alone. Rows of a rollout share their tokens where the budget is too small for all
    of them apart: as a tree they have no more positions than prompt and response, and one more for each row."""
    if alone.room <= budget or not any(sequence.is_further_row for sequence in unit):
        return alone
    size = size_of([labels(sequence) for sequence in unit])
    return UnitCluster(alone.units, _room(size), cost.of_tree(size), is_shared=True)


def _divided(
    units: Sequence[Sequence[PackableSequence]],
    alone: Sequence[UnitCluster],
    replicas: int,
    budget: int,
    cost: CostModel,
    prefix_sharing: PrefixSharing,
) -> Iterator[list[UnitCluster]]:
    """Yields the clusters of whole groups, of halves and so on, as long as any cluster shares tokens; a single replica
    has no use for halves."""
    groups = _groups(units)
    if max(sum(len(units[index]) for index in group) for group in groups) < 2:
        return
    trees = _Trees(units, alone, budget, cost, 0.0 if prefix_sharing == "always" else LEAST_SAVED)
    parts, largest = 1, max(len(group) for group in groups)
    while parts == 1 or (replicas > 1 and parts < largest):
        clusters = [cluster for group in groups for part in _cut(group, parts) for cluster in trees.of(part)]
        if any(cluster.is_shared for cluster in clusters):
            yield clusters
        parts *= 2


def _groups(units: Sequence[Sequence[PackableSequence]]) -> list[list[int]]:
    """Returns the units of each prompt; prompts, and units of one, are in their order."""
    found: dict[bytes, list[int]] = {}
    for index, (first, *_) in enumerate(units):
        found.setdefault(first.token_ids[: first.prompt_length].tobytes(), []).append(index)
    return list(found.values())


def _cut(group: Sequence[int], parts: int) -> list[Sequence[int]]:
    size = -(-len(group) // parts)
    return [group[start : start + size] for start in range(0, len(group), size)]


class _Trees:
    """Turns units of one prompt into clusters, as few as the budget allows."""

    def __init__(
        self,
        units: Sequence[Sequence[PackableSequence]],
        alone: Sequence[UnitCluster],
        budget: int,
        cost: CostModel,
        least_saved: float,
    ) -> None:
        self._labels: list[list[Labels]] = [[labels(sequence) for sequence in unit] for unit in units]
        self._alone = alone
        self._budget = budget
        self._cost = cost
        self._least_saved = least_saved

    def of(self, units: Sequence[int]) -> list[UnitCluster]:
        """Returns the clusters of these units, each alone if too little is shared."""
        size = size_of([one for index in units for one in self._labels[index]])
        tokens = sum(self._alone[index].room for index in units)
        if size.positions > (1 - self._least_saved) * sum(len(one) for index in units for one in self._labels[index]):
            return [self._alone[index] for index in units]
        room = _room(size)
        if min(room, tokens) > self._budget and len(units) > 1:
            return [cluster for half in _cut(units, 2) for cluster in self.of(half)]
        return [UnitCluster(tuple(units), room, self._cost.of_tree(size), is_shared=True)]


def _room(size: TreeSize) -> int:
    return size.positions + (size.path_tokens - size.positions) // KEYS_OF_A_TOKEN


def _planned(clusters: Sequence[UnitCluster], replicas: int, budget: int) -> Plan:
    return plan([cluster.room for cluster in clusters], replicas, budget, costs=[cluster.cost for cluster in clusters])


def _duration(clusters: Sequence[UnitCluster], planned: Plan, cost: CostModel) -> float:
    """Returns the cost of all rounds of micro-batches; replicas wait for the costliest one of each.

    It adds in order, so that ranks on other machines choose the same plan.
    """

    def of_row(chosen: Sequence[int]) -> float:
        members = [clusters[index] for index in chosen]
        return cost.of_row(sum(one.cost for one in members), is_tree=any(one.is_shared for one in members))

    return sum(max(map(of_row, one)) for one in zip(*planned, strict=True))


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
