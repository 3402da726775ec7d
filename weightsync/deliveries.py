"""Versions that a subscriber hands over: a whole one, or, where there is no room for a second version, one that is
still arriving. The receiving thread then passes on bucket after bucket to the engine, which is paused from the first
one on. The memory in which they arrive is used again once no engine reads it any more.

    thread: give ─► waits ─► give ─► waits ─► ...          end
              └──► engine ──┘  └──► engine ──┘                 └──► check, go on generating, or stay paused
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema.weights import TensorSpec, WeightManifest

from .limits import Deadline
from .tensors.buckets import allocate, views
from .tensors.shared_memory import attachable_memory

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


_WAIT_S = 0.05
"""Time between two checks of the deadline; the thread notices at once when the engine is done with a bucket."""

Part = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Delivery:
    """One complete version, or the base of adapters."""

    manifest: WeightManifest
    landed: BufferSet
    """Its memory may be overwritten once the caller waits for the next version."""
    may_be_reused: bool
    """Whether a later version may use this memory; otherwise the puller keeps it as its base for deltas."""
    is_verified: bool = True
    """Whether every byte was compared with the fingerprints. All is, except a base in the model's files."""

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the named tensors as views, in the order in which they were published. The list is the same one where
        the same memory was used before."""
        return self.landed.tensors(self.manifest.tensors)


class StreamedDelivery:
    """A version that the receiver's thread hands over part by part, by `give` and at last `finish`, to the worker's
    event loop, in which all other methods are called.

    The thread waits until the engine has loaded each part, at most until its deadline, so neither side waits longer for
    the other.
    """

    def __init__(self, offer: WeightManifest, on_first: Callable[["StreamedDelivery"], None]) -> None:
        """`on_first` is called with this object once its first part is there."""
        self.manifest = offer
        """At first the offer, without fingerprints. The verified manifest replaces it after the last part."""
        self.has_begun = False
        """Whether a part was handed over, so that the engine may hold some of the version."""
        self._on_first = on_first
        self._is_here = False
        """Whether `on_first` was called."""
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Part | WeightManifest | WeightSyncError] = asyncio.Queue()
        """Parts, and then the manifest, if the parts are those that were published, or else an error."""
        self._is_done = threading.Event()
        """Set once the engine has loaded the last part: its memory may be received into again."""
        self._is_settled = False
        """Whether the caller has left the block of `taken`: the rest is received only for the group's other members."""
        self._refusal = ""
        """Why the engine did not take the version; the learner is told."""

    def give(self, part: Part, deadline: Deadline) -> None:
        """Hand over `part`, from the receiver's thread. Returns once the engine has loaded it, or wants no more of the
        version. Raises WeightSyncError if it has not by the deadline."""
        self._hand_over(part, deadline)

    def finish(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """Say, from the receiver's thread, that the parts are those that were published. Returns once the engine
        generates with them; raises WeightSyncError if it does not by the deadline."""
        self._hand_over(manifest, deadline)
        if self._refusal:
            raise WeightSyncError(self._refusal)

    def fail(self, error: WeightSyncError) -> None:
        """End the version with `error`: no more parts will come."""
        self._coming.put_nowait(error)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[AsyncIterator[Part]]:
        """Yield an iterator over the parts: the named tensors of one bucket each, which is overwritten once the next
        part is asked for. At the end of the block the engine has swapped them in, or gives them up. If the block ends
        early, the transfer goes on without the engine.

        The iterator raises WeightSyncError if the rest does not come, or if the parts are not those that were
        published.
        """
        try:
            async with aclosing(self._parts()) as parts:
                yield parts
        except BaseException as error:
            self._refusal = f"the engine did not take it: {error}"
            raise
        finally:
            self._is_settled = True
            self._is_done.set()

    async def _parts(self) -> AsyncGenerator[Part, None]:
        while not isinstance(coming := await self._coming.get(), WeightManifest):
            if isinstance(coming, WeightSyncError):
                raise self._raisable(coming)
            self.has_begun = True
            yield coming
            self._is_done.set()
        self.manifest = coming

    def _hand_over(self, coming: Part | WeightManifest, deadline: Deadline) -> None:
        if self._is_settled:  # the group's other members still need the rest
            return
        self._is_done.clear()
        self._loop.call_soon_threadsafe(self._note, coming)
        while not (self._is_done.wait(_WAIT_S) or self._is_settled):
            deadline.check("the engine has not taken what came of the new weights")

    def _note(self, coming: Part | WeightManifest) -> None:
        self._coming.put_nowait(coming)
        if not self._is_here:
            self._is_here = True
            self._on_first(self)

    def _raisable(self, error: WeightSyncError) -> WeightSyncError:
        """Return an error to raise in place of `error`: one that says that nothing was touched must not be passed on
        once the engine holds a part."""
        return WeightSyncError(str(error)) if isinstance(error, NoRoomError) and self.has_begun else error
