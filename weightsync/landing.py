"""Where broadcasts arrive: memory that is used again once nobody looks at it any more."""

from collections.abc import Sequence

import torch

from .buckets import allocate


class Landing:
    """Sets of buckets on one device. An engine maps a set only once, so the same sets come back as long as they fit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[torch.Tensor, ...]] = []

    def take(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Buckets of these sizes, to be overwritten."""
        for buckets in self._free:
            if [bucket.numel() for bucket in buckets] == list(sizes):
                self._free = []  # another set of the same sizes would be one too many
                return buckets
        self._free = []
        return allocate(sizes, self._device)

    def give_back(self, buckets: tuple[torch.Tensor, ...]) -> None:
        """Nobody looks at them any more."""
        self._free.append(buckets)

    def forget(self) -> None:
        """Free what lies unused."""
        self._free = []
