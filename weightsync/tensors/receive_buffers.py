"""Memory in which versions arrive, and which is used again once no engine reads it any more."""

import itertools
import logging
from collections.abc import Iterator, Sequence

import torch

from headway.broker.errors import NoRoomError
from headway.broker.schema.weights import TensorSpec

from .buckets import allocate, views
from .shared_memory import attachable_memory

logger = logging.getLogger(__name__)


class BufferSet:
    """A set of buckets in which a version lies, and the tensors in them."""

    def __init__(self, buckets: tuple[torch.Tensor, ...]) -> None:
        self.buckets = buckets
        self._views: tuple[tuple[TensorSpec, ...], list[tuple[str, torch.Tensor]]] | None = None

    @property
    def device(self) -> torch.device:
        """The device of its buckets."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    def tensors(self, specs: tuple[TensorSpec, ...]) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors as views, in the order of `specs`; the same list as long as `specs` are the same."""
        if self._views is None or self._views[0] != specs:
            self._views = specs, views(specs, self.buckets)
        return self._views[1]


class BufferPool:
    """Sets of buckets on one device. An engine maps a set only once, so the same sets are used as long as they fit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[BufferSet] = []

    def take(self, sizes: Sequence[int]) -> BufferSet:
        """Return buckets of these sizes in bytes, which the caller may overwrite."""
        free, self._free = self._free, []  # keep no more sets than are used
        for landed in free:
            if [bucket.numel() for bucket in landed.buckets] == list(sizes):
                return landed
        return BufferSet(allocate(sizes, self._device))

    def give_back(self, landed: BufferSet) -> None:
        """Take `landed` back: no engine reads it any more."""
        self._free.append(landed)


class DoubleBuffer:
    """Two buckets through which a whole version passes: one is received into while the engine loads the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buckets: tuple[torch.Tensor, ...] = ()
        self._specs: tuple[TensorSpec, ...] | None = None
        self._of_bucket: dict[int, tuple[TensorSpec, ...]] = {}

    def buckets(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield a bucket for each size: the third has the memory of the first. Raises NoRoomError."""
        largest = max(sizes, default=0)
        if not self._buckets or self._buckets[0].numel() < largest:
            self._buckets = ()  # freed first, or there would be four
            self._buckets = allocate([largest, largest], self.device)
        for index, size in enumerate(sizes):
            yield self._buckets[index % 2][:size]

    def tensors(
        self, specs: tuple[TensorSpec, ...], index: int, bucket: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that lie in bucket number `index`, as views."""
        if self._specs is not specs:
            by_bucket = itertools.groupby(specs, lambda spec: spec.bucket)
            self._specs, self._of_bucket = specs, {number: tuple(some) for number, some in by_bucket}
        return views(self._of_bucket.get(index, ()), {index: bucket})


def attachable_buckets(sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return uninitialised buckets of these sizes in bytes, which are whole rows, in memory that processes of this
    machine can attach, or in ordinary memory where that has no room. Raises NoRoomError."""
    try:
        memory = attachable_memory(sum(sizes))
    except NoRoomError as error:
        logger.info(
            "%d bytes of weights come into ordinary memory, of which an engine gets a copy: %s", sum(sizes), error
        )
        return allocate(sizes)
    return tuple(torch.split(memory, list(sizes))) if sizes else ()
