"""What a subscriber hands over: a whole version, or, where there is no room for a second one, a version on its way,
bucket after bucket from the thread that receives to the engine, which is paused from the first one on.

    thread: give ─► waits ─► give ─► waits ─► ...          end
              └──► engine ──┘  └──► engine ──┘                 └──► check, go on generating, or stay paused
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import torch

from broker.errors import NoRoomError, WeightSyncError
from broker.schema import WeightManifest
from weightsync.deadline import Deadline
from weightsync.tensors.landing import Landed

_WAIT_S = 0.05
"""Between two looks at the deadline; an engine that is done with a bucket is noticed at once."""

Part = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Delivery:
    """One complete version, every byte verified."""

    manifest: WeightManifest
    landed: Landed
    """It may be overwritten once the next version is waited for."""
    may_be_reused: bool
    """For a later version; or else it is the puller's, who keeps it."""

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Views, in the order in which they were published; the same list where the same memory was used again."""
        return self.landed.tensors(self.manifest.tensors)


class Arriving:
    """A version that the receiver's thread hands over part by part, with `give` and at last `finish`, to whoever has
    taken it in the event loop, where everything else belongs.

    The thread waits until each part is loaded, by its deadline at the latest: nobody waits longer for either side.
    """

    def __init__(self, offer: WeightManifest, on_first: Callable[["Arriving"], None]) -> None:
        """`on_first` is called with it once its first part is there."""
        self.manifest = offer
        """At first the offer, without fingerprints: they come after the last part, once it is verified."""
        self.has_begun = False
        """A part of it was handed over: the engine may hold some of it."""
        self._on_first = on_first
        self._is_here = False
        """`on_first` was called."""
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Part | WeightManifest | WeightSyncError] = asyncio.Queue()
        """Parts; then the manifest, if they are what was published, or else an error."""
        self._is_done = threading.Event()
        """What the thread handed over last is loaded: its memory may be received into again."""
        self._is_settled = False
        """The caller has left the block of `taken`: the rest is received for the others of the group only."""
        self._refusal = ""
        """Why the engine did not take it; the learner is told."""

    def give(self, part: Part, deadline: Deadline) -> None:
        """From the receiver's thread: until the engine has loaded `part`, or wants no more of it. Raises
        WeightSyncError if it has not by the deadline."""
        self._hand_over(part, deadline)

    def finish(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """From the receiver's thread: what came is what was published. Until the engine generates with it; raises
        WeightSyncError if it has not taken it by the deadline."""
        self._hand_over(manifest, deadline)
        if self._refusal:
            raise WeightSyncError(self._refusal)

    def fail(self, error: WeightSyncError) -> None:
        """No more of it will come."""
        self._coming.put_nowait(error)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[AsyncIterator[Part]]:
        """Yields the named tensors of each bucket, which is overwritten once the next one is asked for. They are
        swapped in, or of no use, at the end of the block; an early end lets the transfer go on without the engine.

        The parts raise WeightSyncError if the rest does not come, or something else came than was published.
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
        if self._is_settled:  # the others of the group are not kept from the rest
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
        """One that promises that nothing was touched must not be passed on once something was."""
        return WeightSyncError(str(error)) if isinstance(error, NoRoomError) and self.has_begun else error
