"""Computes what an engine's parameters hold of each published tensor, in a few operations."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from headway.rollout_workers.engines.held import Held
from headway.weightsync.tensors.fingerprint import MatrixParts, fingerprint_parts

from .placement import Block, Placement, rows_of

ROWS_AT_ONCE = 1 << 21
"""Rows of parameters that are added up together. Each row needs some tens of bytes."""


class _ParameterBatch(NamedTuple):
    """Parameters that are added up together, and the tensors that their rows belong to."""

    parameters: tuple[str, ...]
    parts: MatrixParts
    numbers: torch.Tensor
    """The number of each part's tensor."""


class HeldRows:
    """The runs of rows of one placement that belong to each of the tensors `names`, on the parameters' device."""

    def __init__(self, placement: Placement, parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        self._names = tuple(names)
        number = {name: place for place, name in enumerate(names)}
        self._elements_N = np.zeros(len(names), np.int64)
        of_parameter: dict[str, list[Block]] = {}
        for block in placement.blocks:
            of_parameter.setdefault(block.parameter, []).append(block)
            self._elements_N[number[block.source]] += block.rows * rows_of(parameters[block.parameter]).shape[1]
        heights = {name: len(rows_of(parameters[name])) for name in of_parameter}
        self._runs = [_run(some, heights, of_parameter, number, parameters) for some in _together(heights, parameters)]

    def held(self, parameters: Mapping[str, torch.Tensor]) -> Held:
        """Return what the parameters hold now. Waits for a GPU once."""
        totals: torch.Tensor | None = None
        for run in self._runs:
            added = fingerprint_parts([rows_of(parameters[name]) for name in run.parameters], run.parts)
            if totals is None:
                totals = torch.zeros(len(self._names), dtype=torch.int64, device=added.device)
            totals.index_add_(0, run.numbers, added)
        found = np.zeros(len(self._names), np.uint64) if totals is None else totals.cpu().numpy().view(np.uint64)
        return Held(self._names, found, self._elements_N)


def whole(names: tuple[str, ...], processes: Sequence[tuple[bytes, bytes] | None]) -> Held | None:
    """Add up what the processes hold; None if a process does not know. The head counts as a tensor of its own even if
    the model's head is tied."""
    known = [held for held in processes if held is not None]
    if len(known) < len(processes):
        return None
    return Held.together(
        Held(names, np.frombuffer(fingerprints, np.uint64), np.frombuffer(elements, np.int64))
        for fingerprints, elements in known
    )


def _together(heights: Mapping[str, int], parameters: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Group parameters of one device with at most `ROWS_AT_ONCE` rows together; a larger parameter is alone."""
    run: list[str] = []
    for name in heights:
        is_full = sum(heights[other] for other in run) + heights[name] > ROWS_AT_ONCE
        if run and (is_full or parameters[run[0]].device != parameters[name].device):
            yield run
            run = []
        run.append(name)
    if run:
        yield run


def _run(
    names: Sequence[str],
    heights: Mapping[str, int],
    of_parameter: Mapping[str, Sequence[Block]],
    number: Mapping[str, int],
    parameters: Mapping[str, torch.Tensor],
) -> _ParameterBatch:
    device, first, rows, numbers = parameters[names[0]].device, 0, [], []
    for name in names:
        for block in of_parameter[name]:
            start = first + block.first_row
            rows.append((start, start + block.rows, block.offset, block.row_step, block.column_step))
            numbers.append(number[block.source])
        first += heights[name]
    return _ParameterBatch(tuple(names), MatrixParts.of(rows, device), torch.tensor(numbers, device=device))
