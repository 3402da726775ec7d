"""Versions that a subscriber hands over: a whole one, or, where there is no room for a second version, one that is
still arriving. The receiving thread then passes on bucket after bucket to the engine, which is paused from the first
one on.

    thread: give ─► waits ─► give ─► waits ─► ...          end
              └──► engine ──┘  └──► engine ──┘                 └──► check, go on generating, or stay paused
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema.weights import WeightManifest
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.receive_buffers import BufferSet

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
                raise self._in_words(coming)
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

    def _in_words(self, error: WeightSyncError) -> WeightSyncError:
        """Return an error to raise in place of `error`: one that says that nothing was touched must not be passed on
        once the engine holds a part."""
        return WeightSyncError(str(error)) if isinstance(error, NoRoomError) and self.has_begun else error
