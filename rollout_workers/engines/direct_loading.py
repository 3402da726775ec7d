"""Weights straight into an engine's parameters, once it is known where its own loader puts them.

The first version goes through the loader, which is traced on the way (`placement`), and copied again by what was found:
only if that comes to the same bits is it used for all versions that follow. Else the loader does them all.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from broker.errors import WeightSyncError
from weightsync.fingerprint import MODULUS, fingerprint

from .base import HeldTensor
from .held_rows import HeldRows
from .placement import Copies, Load, Placement, Published, scribble, trace

logger = logging.getLogger(__name__)

NOTHING = HeldTensor(0, 0)


class DirectLoading:
    """Of one process of an engine. `parameters` are looked up anew each time: a loader may replace them.

    `derived`: its other tensors: if one of them depends on the weights, the loader must go on making it.
    `keeps_packed`: what it computes with are packed copies, so only its loader can fill them.
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
        self._placement: Placement | None = None
        self._rows: HeldRows | None = None
        self._copies: tuple[Mapping[str, torch.Tensor], list[int], Copies] | None = None
        """The last ones, with the tensors and the addresses of the parameters that they are for."""

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
            self._published, self._placement = published, self._found(published, tensors)
            self._rows = None if self._placement is None else HeldRows(self._placement, self._parameters())
        elif self._placement is None:
            self._load(tensors.items())
        else:
            copies = self._placement.copies(parameters, tensors)
            copies.make()
            # Host memory is another each time, and would be kept for nothing.
            is_kept = all(tensor.is_cuda for tensor in tensors.values())
            self._copies = (tensors, addresses, copies) if is_kept else None

    def held(self) -> dict[str, HeldTensor] | None:
        """By published name; None where the loader keeps the weights in a form of its own."""
        return None if self._rows is None else self._rows.held(self._parameters())

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


def together(parts: Iterable[Mapping[str, HeldTensor]]) -> dict[str, HeldTensor]:
    """Of all processes of an engine."""
    found: dict[str, HeldTensor] = {}
    for held in parts:
        found |= {name: merged(found.get(name, NOTHING), one) for name, one in held.items()}
    return found


def merged(one: HeldTensor, other: HeldTensor) -> HeldTensor:
    """Of two parts."""
    return HeldTensor((one.fingerprint + other.fingerprint) % MODULUS, one.elements + other.elements)
