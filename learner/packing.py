"""Sequences laid end to end into micro-batches under a token budget, balanced over replicas, without padding.

Every rank works out the same plan from the same sequences; nothing is sent. The loss does not depend on the
plan: packing only decides what is computed together.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from broker.schema import Trajectory
from broker.staleness import is_too_stale, lag_of

from .batch import PackedBatch

QUADRATIC_COST = 1 / 24576
"""Attention's share: a sequence of L tokens costs L + L * L / 24576, what a model of width 4096 spends."""

Plan = list[list[list[int]]]
"""[replica][micro-batch] -> indices of its sequences, ascending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackableSequence:
    """One prompt with its response. L tokens, the last R of them the response."""

    token_ids: NDArray[np.int32]
    """[L]"""
    prompt_length: int
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the token is trained."""
    behavior_logprobs: NDArray[np.float32]
    """[R]"""
    lags: NDArray[np.int64]
    """[R]"""
    advantages: NDArray[np.float32]
    """[R]"""


def from_trajectory(
    trajectory: Trajectory, *, advantages: float | NDArray[np.float32], step: int, max_lag: int
) -> PackableSequence:
    """What step `step` trains of a trajectory, whose advantage is one for all of its tokens, or [R].

    Tokens over the staleness bound are context only. Under `staleness.on_over_bound` requeue and drop the broker hands
    out none, unless the bound was lowered since.
    """
    lags = np.zeros(len(trajectory.response_tokens), np.int64)
    loss_mask = trajectory.loss_mask.copy()
    for span in trajectory.spans:
        lags[span.start : span.end] = lag_of(span.version, step)
        if is_too_stale(span.version, step, max_lag):
            loss_mask[span.start : span.end] = 0
    return PackableSequence(
        token_ids=np.concatenate([trajectory.prompt_tokens, trajectory.response_tokens]).astype(np.int32),
        prompt_length=len(trajectory.prompt_tokens),
        loss_mask=loss_mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        lags=lags,
        advantages=np.broadcast_to(np.float32(advantages), lags.shape),
    )


def sequence_cost(length: int) -> float:
    """Relative time of one sequence: linear layers and attention."""
    return length + length * length * QUADRATIC_COST


def plan(lengths: Sequence[int], replicas: int, micro_batch_tokens: int) -> Plan:
    """Every sequence exactly once; every replica the same number of micro-batches, at least one, some empty.

    A micro-batch holds at most `micro_batch_tokens`, or a single sequence that is longer: none is ever cut.
    """
    shares = _balance(lengths, replicas)
    packed = [_first_fit(indices, lengths, micro_batch_tokens) for indices in shares]
    count = max(1, *(len(bins) for bins in packed))
    levelled = [
        _level(indices, lengths, count, micro_batch_tokens) or bins
        for indices, bins in zip(shares, packed, strict=True)
    ]
    return [[sorted(chosen) for chosen in bins] + [[]] * (count - len(bins)) for bins in levelled]


def _balance(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """Costliest first, each to the replica with least to do: they differ by one sequence's cost at most."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]
    for index in _longest_first(range(len(lengths)), lengths):
        load, replica = loads[0]
        shares[replica].append(index)
        heapq.heapreplace(loads, (load + sequence_cost(lengths[index]), replica))
    return shares


def _longest_first(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def _first_fit(indices: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As few micro-batches as first-fit decreasing finds."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        place = next((b for b, left in enumerate(room) if lengths[index] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def _level(indices: list[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """The same sequences spread evenly, as replicas wait for each other at every micro-batch; None: no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for index in indices:
        load, place = loads[0]
        if load and load + lengths[index] > budget:
            return None
        bins[place].append(index)
        heapq.heapreplace(loads, (load + lengths[index], place))
    return bins


def pack(
    sequences: Sequence[PackableSequence], replica: int, replicas: int, micro_batch_tokens: int
) -> list[PackedBatch]:
    """This replica's micro-batches. All ranks call it with the same sequences in the same order."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return [
        concatenate([sequences[i] for i in chosen]) for chosen in plan(lengths, replicas, micro_batch_tokens)[replica]
    ]


def concatenate(sequences: Sequence[PackableSequence]) -> PackedBatch:
    """One micro-batch of these sequences, in this order."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    masks = [_after_prompt(s, s.loss_mask, np.float32) for s in sequences]
    logprobs = [_after_prompt(s, s.behavior_logprobs * (s.loss_mask != 0), np.float32) for s in sequences]
    advantages = [_after_prompt(s, s.advantages * (s.loss_mask != 0), np.float32) for s in sequences]
    lags = [_after_prompt(s, s.lags * (s.loss_mask != 0), np.int64) for s in sequences]
    return PackedBatch(
        token_ids_T=_joined([s.token_ids for s in sequences], np.int64),
        position_ids_T=_joined([np.arange(length) for length in lengths], np.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        loss_mask_T=_joined(masks, np.float32),
        behavior_logprobs_T=_joined(logprobs, np.float32),
        advantages_T=_joined(advantages, np.float32),
        lags_T=_joined(lags, np.int64),
    )


def _after_prompt(sequence: PackableSequence, values_R: NDArray[np.generic], dtype: type) -> NDArray[np.generic]:
    """Response values at their place in the sequence, 0 over the prompt."""
    values_L: NDArray[np.generic] = np.zeros(len(sequence.token_ids), dtype)
    values_L[sequence.prompt_length :] = values_R
    return values_L


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype))
