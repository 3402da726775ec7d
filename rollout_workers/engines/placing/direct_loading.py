"""Weights straight into an engine's parameters, once it is known where its own loader puts them.

The first version goes through the loader, which is traced on the way (`placement`), and copied again by what was found:
only if that comes to the same bits is it used for all versions that follow. Else the loader does them all.

So it is with an engine that quantizes (`engine.options.quantization`): what is published, and told by deltas, is always
of full precision, and the loader makes blocks and scales of every version. Fingerprints then prove what the engine was
handed, not what it holds, which is left to the probe.
"""

import logging
from collections.abc import Callable, Mapping

import torch

from broker.errors import WeightSyncError
from rollout_workers.engines.held import Held
from weightsync.tensors.fingerprint import fingerprint

from .held_rows import HeldRows
from .placement import Copies, Load, Placement, Published, scribble, trace

logger = logging.getLogger(__name__)


class DirectLoading:
    """Loads versions into one process of an engine: by copies where these are found to do what its loader does, else by
    the loader.

    `parameters` are looked up anew each time, as a loader may replace them. `derived` are the engine's other tensors:
    if the loader makes one of them from the weights, copies cannot do without it. `keeps_packed`: the engine computes
    with packed copies of the weights, which only its loader can fill.
    """

    def __init__(
        self,
        load: Load,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        *,
        derived: Callable[[], Mapping[str, torch.Tensor]] = dict,
        keeps_packed: bool = False,
    ) -> None:
        self._load = load
        self._keeps_packed = keeps_packed
        self._parameters = parameters
        self._derived = derived
        self._published: tuple[Published, ...] = ()
        """The last whole version's tensors, in order."""
        self._known: frozenset[Published] = frozenset()
        """The same as a set."""
        self._placement: Placement | None = None
        self._rows: HeldRows | None = None
        self._copies: tuple[Mapping[str, torch.Tensor], list[int], Copies] | None = None
        """The last ones, with the tensors and the addresses of the parameters that they are for."""
        self._came: dict[str, Published] = {}
        """Of a version that comes in parts, by name: its tensors until now."""
        self._gathered: dict[str, torch.Tensor] = {}
        """Copies of them in host memory, for a loader that must see all of them together."""

    @property
    def is_direct(self) -> bool:
        """Whether the next version, with the same tensors, does without the loader."""
        return self._placement is not None

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A whole version, contiguous tensors on any device."""
        parameters = self._parameters()
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        if self._copies is not None and self._copies[0] is tensors and self._copies[1] == addresses:
            self._copies[2].make()
            return
        published = tuple(Published(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        if published != self._published:
            self._known = frozenset(published)
            self._published, self._placement = published, self._found(published, tensors)
            self._rows = None if self._placement is None else HeldRows(self._placement, self._parameters(), [*tensors])
        elif self._placement is None:
            self._load(tensors.items())
        else:
            copies = self._placement.copies(parameters, tensors)
            copies.make()
            # Host memory is another each time, and would be kept for nothing.
            is_kept = all(tensor.is_cuda for tensor in tensors.values())
            self._copies = (tensors, addresses, copies) if is_kept else None

    def begin(self) -> None:
        """A version that may come in parts; one that was left unfinished is forgotten."""
        self._came, self._gathered = {}, {}

    def load_part(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Some tensors of a version like the one before; they may be overwritten afterwards. A loader, which must see
        all of them together, gets them from host memory at the end."""
        self._came |= {name: Published(name, tuple(one.shape), one.dtype) for name, one in tensors.items()}
        if any(self._came[one] not in self._known for one in tensors):
            raise WeightSyncError("other tensors came in parts than a version before, and none of them was loaded")
        if self._placement is None:
            self._gathered |= {name: tensor.cpu() for name, tensor in tensors.items()}
        else:
            self._placement.copies(self._parameters(), tensors).make()

    def end(self) -> None:
        """All parts came, if any did. Raises WeightSyncError if some did not."""
        came, gathered = self._came, self._gathered
        self.begin()
        if came and (missing := len(self._published) - len(came)):
            raise WeightSyncError(f"{missing} of {len(self._published)} tensors did not come")
        if gathered:
            self.load({one.name: gathered[one.name] for one in self._published})

    def held(self) -> Held | None:
        """Of the last version's tensors, in order; None where the loader keeps the weights in a form of its own."""
        return None if self._rows is None else self._rows.held(self._parameters())

    def loaded_rows(self) -> dict[str, list[tuple[int, int]]] | None:
        """By parameter, the runs of rows that every version fills, from one row up to another; None where a loader does
        it. Nothing is known to be filled before the first version."""
        if self._published and self._placement is None:
            return None
        runs: dict[str, list[tuple[int, int]]] = {}
        for block in self._placement.blocks if self._placement else ():
            runs.setdefault(block.parameter, []).append((block.first_row, block.first_row + block.rows))
        return runs

    def _found(self, published: tuple[Published, ...], tensors: Mapping[str, torch.Tensor]) -> Placement | None:
        """Loads the version, one way or the other."""
        placement = self._traced(published)
        self._load(tensors.items())
        return placement if placement and self._reproduces(placement, published, tensors) else None

    def _traced(self, published: tuple[Published, ...]) -> Placement | None:
        """None where the loader does what copying cannot. The weights are numbers then."""
        if self._keeps_packed:
            return None
        try:
            return trace(self._load, self._parameters(), published)
        except WeightSyncError as error:
            logger.warning("weights go through the engine's loader, which takes longer: %s", error)
            return None

    @torch.no_grad()
    def _reproduces(
        self, placement: Placement, published: tuple[Published, ...], tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether copying comes to the bits that are there; they are there again in any case."""
        expected = self._fingerprints()
        scribble(self._load, self._parameters(), published)
        placement.copies(self._parameters(), tensors).make()
        if self._fingerprints() == expected:
            return True
        logger.warning("weights go through the engine's loader: copying them comes to other bits")
        self._load(tensors.items())
        return False

    def _fingerprints(self) -> dict[str, int]:
        """Of parameters, and of what the loader may have made of them."""
        tensors = {**self._derived(), **self._parameters()}
        return {name: fingerprint(tensor) for name, tensor in tensors.items()}
