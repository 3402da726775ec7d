"""Where versions arrive: memory that is used again once nobody looks at it any more."""

from collections.abc import Sequence

import torch

from broker.schema import TensorSpec

from .buckets import allocate, views


class Landed:
    """A set of buckets, and the tensors in them."""

    def __init__(self, buckets: tuple[torch.Tensor, ...]) -> None:
        self.buckets = buckets
        self._views: tuple[tuple[TensorSpec, ...], list[tuple[str, torch.Tensor]]] | None = None

    def tensors(self, specs: tuple[TensorSpec, ...]) -> list[tuple[str, torch.Tensor]]:
        """Views, in the order of `specs`; the same list as long as they are the same."""
        if self._views is None or self._views[0] != specs:
            self._views = specs, views(specs, self.buckets)
        return self._views[1]


class Landing:
    """Sets of buckets on one device. An engine maps a set only once, so the same sets come back as long as they fit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Landed] = []

    def take(self, sizes: Sequence[int]) -> Landed:
        """Buckets of these sizes, to be overwritten."""
        free, self._free = self._free, []  # one set more than is used would be one too many
        for landed in free:
            if [bucket.numel() for bucket in landed.buckets] == list(sizes):
                return landed
        return Landed(allocate(sizes, self._device))

    def give_back(self, landed: Landed) -> None:
        """Nobody looks at it any more."""
        self._free.append(landed)
