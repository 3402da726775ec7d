"""Saves what an engine's process loses in a sleep that discards its tensors, and that no version brings back.

Tensors keep their addresses in such a sleep and lose their numbers. A version fills the rows of parameters that a
loader loads. The other rows (padding, scales), buffers and tensors that modules keep as attributes are saved in host
memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from headway.weightsync.tensors.fingerprint import UNSIGNED

from .weight_placement import rows_of

Runs = Sequence[tuple[int, int]]
"""Runs of rows as [from, to)."""


class SleepBackup:
    """The saved tensors. Make one before the sleep; it holds views, so addresses must stay."""

    def __init__(
        self,
        derived: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        loaded: Mapping[str, Runs] | None,
    ) -> None:
        """`loaded`: the rows that every version fills; None: all rows, as the loader was not traced."""
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
        """Bytes saved in host memory."""
        return sum(copy.nbytes for _, copy in self._saved)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the saved tensors back after waking up."""
        for view, copy in self._saved:
            view.copy_(copy)


def derived_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers, and tensors that modules keep as plain attributes. The KV cache is not among them: the loader
    does not fill it."""
    found = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                found[f"{prefix}.{name}"] = value
    return {name: tensor for name, tensor in found.items() if tensor.element_size() in UNSIGNED}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory that the tensor, perhaps an overlapping view, lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def gaps(runs: Runs, count: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of `count` rows that lie between these."""
    row = 0
    for start, end in sorted(runs):
        if start > row:
            yield row, start
        row = max(row, end)
    if row < count:
        yield row, count
