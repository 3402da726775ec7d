"""What an engine's parameters hold of each published tensor, all of it in a few operations a parameter."""

from collections.abc import Mapping

import torch

from weightsync.fingerprint import MODULUS, Parts, fingerprint_parts

from .base import HeldTensor
from .placement import Block, Placement, rows_of


class HeldRows:
    """Of one placement: which runs of rows belong to which tensor, on the parameters' device."""

    def __init__(self, placement: Placement, parameters: Mapping[str, torch.Tensor]) -> None:
        self._sources = sorted({block.source for block in placement.blocks})
        number = {source: place for place, source in enumerate(self._sources)}
        of_parameter: dict[str, list[Block]] = {}
        for block in placement.blocks:
            of_parameter.setdefault(block.parameter, []).append(block)
        self._elements = dict.fromkeys(self._sources, 0)
        self._parts: dict[str, tuple[Parts, torch.Tensor]] = {}
        for name, blocks in of_parameter.items():
            device, columns = parameters[name].device, rows_of(parameters[name]).shape[1]
            rows = [(b.first_row, b.first_row + b.rows, b.offset, b.row_step, b.column_step) for b in blocks]
            numbers = torch.tensor([number[block.source] for block in blocks], device=device)
            self._parts[name] = Parts.of(rows, device), numbers
            for block in blocks:
                self._elements[block.source] += block.rows * columns

    def held(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, HeldTensor]:
        """By published name, as of now."""
        totals: torch.Tensor | None = None
        for name, (parts, numbers) in self._parts.items():
            added = fingerprint_parts(rows_of(parameters[name]), parts)
            if totals is None:
                totals = torch.zeros(len(self._sources), dtype=torch.int64, device=added.device)
            totals.index_add_(0, numbers, added)
        found = [] if totals is None else totals.tolist()
        return {
            source: HeldTensor(total % MODULUS, self._elements[source])
            for source, total in zip(self._sources, found, strict=True)
        }
