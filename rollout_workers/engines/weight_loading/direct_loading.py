"""Copies weights straight into an engine's parameters, once it is known where the engine's own loader puts them.

The first version goes through the loader, which is traced (`placement`). Then the found copies are made once: only if
they give the same bits are all later versions copied. Otherwise the loader loads every version.

A placement that an earlier engine has kept on disk (`placement_cache`) saves the trace: it is proved by two loads.

The loader also loads every version of an engine that quantizes (`engine.options.quantization`): the learner publishes
full precision, and the loader makes blocks and scales of it. Fingerprints then prove what the engine was given; what it
holds is left to the probe.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.base import WeightFingerprints
from headway.weightsync.tensors.fingerprint import UNSIGNED, MatrixParts, fingerprint, fingerprint_parts

from .weight_placement import (
    Block,
    Copies,
    Load,
    Placement,
    PlacementCache,
    PublishedTensor,
    rows_of,
    runs_of,
    scrambled,
    scribble,
    trace,
)

logger = logging.getLogger(__name__)


class DirectLoading:
    """Loads versions into one process of an engine: by copies if they do what the loader does, else by the loader.

    `parameters` is called for every version, as a loader may replace them. `derived` returns the engine's other
    tensors: if the loader makes one of them from the weights, copies do not suffice. `keeps_packed`: the engine
    computes with packed copies of the weights, which only its loader can fill.
    """

    def __init__(
        self,
        load: Load,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        *,
        derived: Callable[[], Mapping[str, torch.Tensor]] = dict,
        keeps_packed: bool = False,
        kept: PlacementCache | None = None,
    ) -> None:
        self._load = load
        self._kept = kept
        self._keeps_packed = keeps_packed
        self._parameters = parameters
        self._derived = derived
        self._published: tuple[PublishedTensor, ...] = ()
        """The tensors of the last whole version, in order."""
        self._known: frozenset[PublishedTensor] = frozenset()
        """The tensors of `_published` as a set."""
        self._placement: Placement | None = None
        self._rows: RowFingerprints | None = None
        self._copies: tuple[Mapping[str, torch.Tensor], list[int], Copies] | None = None
        """The copies made last, with the tensors and the parameters' addresses that they are for."""
        self._came: dict[str, PublishedTensor] = {}
        """The tensors that have come of a version in parts, by name."""
        self._gathered: dict[str, torch.Tensor] = {}
        """Copies of these in host memory, for a loader that must see all of them together."""

    @property
    def is_direct(self) -> bool:
        """Whether the next version, if it has the same tensors, is loaded without the loader."""
        return self._placement is not None

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole version: contiguous tensors on any device."""
        parameters = self._parameters()
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        if self._copies is not None and self._copies[0] is tensors and self._copies[1] == addresses:
            self._copies[2].make()
            return
        published = tuple(PublishedTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        if published != self._published:
            self._known = frozenset(published)
            self._published, self._placement = published, self._found(published, tensors)
            self._rows = (
                None if self._placement is None else RowFingerprints(self._placement, self._parameters(), [*tensors])
            )
        elif self._placement is None:
            self._load(tensors.items())
        else:
            copies = self._placement.copies(parameters, tensors)
            copies.make()
            # Tensors in host memory lie elsewhere each time, so copies of them would be kept for nothing.
            is_kept = all(tensor.is_cuda for tensor in tensors.values())
            self._copies = (tensors, addresses, copies) if is_kept else None

    def begin(self) -> None:
        """Begin a version that may come in parts, and forget an unfinished one."""
        self._came, self._gathered = {}, {}

    def load_part(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load some tensors of a version like the one before. The caller may overwrite them afterwards. If the loader
        must see all tensors together, it gets them from host memory at the end."""
        self._came |= {name: PublishedTensor(name, tuple(one.shape), one.dtype) for name, one in tensors.items()}
        if any(self._came[one] not in self._known for one in tensors):
            raise WeightSyncError("other tensors came in parts than a version before, and none of them was loaded")
        if self._placement is None:
            self._gathered |= {name: tensor.cpu() for name, tensor in tensors.items()}
        else:
            self._placement.copies(self._parameters(), tensors).make()

    def end(self) -> None:
        """End a version that may have come in parts. Raises WeightSyncError if only some of its parts came."""
        came, gathered = self._came, self._gathered
        self.begin()
        if came and (missing := len(self._published) - len(came)):
            raise WeightSyncError(f"{missing} of {len(self._published)} tensors did not come")
        if gathered:
            self.load({one.name: gathered[one.name] for one in self._published})

    def held(self) -> WeightFingerprints | None:
        """Return what the engine holds of the last version's tensors, in order; None if the loader keeps weights in
        another form."""
        return None if self._rows is None else self._rows.held(self._parameters())

    def loaded_rows(self) -> dict[str, list[tuple[int, int]]] | None:
        """Return the rows that every version fills, by parameter, as runs from one row up to another; None if the
        loader loads them. Before the first version no row is known to be filled."""
        if self._published and self._placement is None:
            return None
        return runs_of(self._placement) if self._placement else {}

    def _found(self, published: tuple[PublishedTensor, ...], tensors: Mapping[str, torch.Tensor]) -> Placement | None:
        """Load the version, and return the placement if copies reproduce it."""
        if (known := self._proved(published, tensors)) is not None:
            return known
        placement = self._traced(published)
        self._load(tensors.items())
        if not (placement and self._reproduces(placement, published, tensors)):
            return None
        if self._kept is not None:
            self._kept.write(published, self._parameters(), placement)
        return placement

    @torch.no_grad()
    def _proved(self, published: tuple[PublishedTensor, ...], tensors: Mapping[str, torch.Tensor]) -> Placement | None:
        """Load the version, and return the placement that was kept, if the loader puts everything where that says, and
        touches nothing else: tensors that differ everywhere, so that no two may be mistaken for each other, and those
        of this version. Nothing is copied, as a wrong copy could leave numbers where no later version goes."""
        known = None if self._kept is None or self._keeps_packed else self._kept.read(published, self._parameters())
        if known is None:
            return None
        device, rest = next(iter(self._parameters().values())).device, self._rest(known)
        self._load(scrambled(published, device))
        parameters = self._parameters()  # once: there may be tens of thousands of tensors
        is_right = all(known.is_at(parameters, {name: one}) for name, one in scrambled(published, device))
        self._load(tensors.items())
        if is_right and known.is_at(self._parameters(), tensors) and self._rest(known) == rest:
            return known
        logger.warning("this loader puts weights elsewhere than that of an engine before: it is traced")
        return None

    def _rest(self, placement: Placement) -> list[int]:
        """Return the fingerprints of all that the placement's copies leave as it is."""
        runs, rest = runs_of(placement), [fingerprint(tensor) for tensor in self._derived().values()]
        for name, parameter in self._parameters().items():
            rows = rows_of(parameter)
            rest += [fingerprint(rows[start:end]) for start, end in gaps(runs.get(name, ()), len(rows))]
        return rest

    def _traced(self, published: tuple[PublishedTensor, ...]) -> Placement | None:
        """Trace the loader; afterwards the parameters hold numbers, not weights. Returns None if the loader does more
        than copy."""
        if self._keeps_packed:
            return None
        try:
            return trace(self._load, self._parameters(), published)
        except WeightSyncError as error:
            logger.warning("weights go through the engine's loader, which takes longer: %s", error)
            return None

    @torch.no_grad()
    def _reproduces(
        self, placement: Placement, published: tuple[PublishedTensor, ...], tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Return whether copies give the bits that the loader gave. The parameters hold these bits afterwards in any
        case."""
        expected = self._fingerprints()
        scribble(self._load, self._parameters(), published)
        placement.copies(self._parameters(), tensors).make()
        if self._fingerprints() == expected:
            return True
        logger.warning("weights go through the engine's loader: copying them comes to other bits")
        self._load(tensors.items())
        return False

    def _fingerprints(self) -> dict[str, int]:
        """Return the fingerprints of the parameters, and of the tensors that the loader may have made of them."""
        tensors = {**self._derived(), **self._parameters()}
        return {name: fingerprint(tensor) for name, tensor in tensors.items()}


ROWS_AT_ONCE = 1 << 21
"""Rows of parameters that are added up together. Each row needs some tens of bytes."""


class _ParameterBatch(NamedTuple):
    """Parameters that are added up together, and the tensors that their rows belong to."""

    parameters: tuple[str, ...]
    parts: MatrixParts
    numbers: torch.Tensor
    """The number of each part's tensor."""


class RowFingerprints:
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

    def held(self, parameters: Mapping[str, torch.Tensor]) -> WeightFingerprints:
        """Return what the parameters hold now. Waits for a GPU once."""
        totals: torch.Tensor | None = None
        for run in self._runs:
            added = fingerprint_parts([rows_of(parameters[name]) for name in run.parameters], run.parts)
            if totals is None:
                totals = torch.zeros(len(self._names), dtype=torch.int64, device=added.device)
            totals.index_add_(0, run.numbers, added)
        found = np.zeros(len(self._names), np.uint64) if totals is None else totals.cpu().numpy().view(np.uint64)
        return WeightFingerprints(self._names, found, self._elements_N)


def sum_of_processes(
    names: tuple[str, ...], processes: Sequence[tuple[bytes, bytes] | None]
) -> WeightFingerprints | None:
    """Add up what the processes hold; None if a process does not know. The head counts as a tensor of its own even if
    the model's head is tied."""
    known = [held for held in processes if held is not None]
    if len(known) < len(processes):
        return None
    return WeightFingerprints.together(
        WeightFingerprints(names, np.frombuffer(fingerprints, np.uint64), np.frombuffer(elements, np.int64))
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
