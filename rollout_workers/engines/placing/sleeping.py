"""What an engine's process must have again after a sleep that discards its tensors, and that no version brings.

Addresses survive such a sleep, numbers do not. A version fills the rows of parameters that a loader loads; the others
(padding, scales), buffers and tensors that modules keep as attributes are saved in host memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from .placement import rows_of

Runs = Sequence[tuple[int, int]]
"""[from, to) rows."""


class Kept:
    """Made before the sleep. What it holds are views: addresses must stay."""

    def __init__(
        self,
        derived: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        loaded: Mapping[str, Runs] | None,
    ) -> None:
        """`loaded`: the rows that every version fills; None: all of them, by a loader that nobody has looked into."""
        of_parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in derived.values()}
        views = [_whole(tensor) for address, tensor in memory.items() if address not in of_parameters]
        if loaded is not None:
            for name, parameter in parameters.items():
                rows = rows_of(parameter)
                views += [rows[start:end] for start, end in gaps(loaded.get(name, ()), len(rows))]
        self._saved = [(view, view.to("cpu", copy=True)) for view in views]

    @property
    def nbytes(self) -> int:
        """In host memory."""
        return sum(copy.nbytes for _, copy in self._saved)

    @torch.no_grad()
    def restore(self) -> None:
        """After waking up."""
        for view, copy in self._saved:
            view.copy_(copy)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that the tensor, perhaps an overlapping view, lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def gaps(runs: Runs, count: int) -> Iterator[tuple[int, int]]:
    """The runs of `count` rows that lie between these."""
    row = 0
    for start, end in sorted(runs):
        if start > row:
            yield row, start
        row = max(row, end)
    if row < count:
        yield row, count
