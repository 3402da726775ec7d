"""A version that is being gathered into buckets. The places of its tensors are known from the previous version, so the
learner can send the first buckets while it gathers the last ones; the first version, and one of other tensors, is
staged whole before it is sent.

Two threads meet here: the learner's own takes the tensors, as gathering them may be collective, and goes on training;
another one sends the buckets.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from headway.broker.errors import WeightSyncError

from .buckets import Fingerprints, allocate
from .staging import Named, Places, StagedWeights, stage

_OTHER = "other tensors are published than in the version before"
_FAILED = "the tensors of this version could not be gathered"


class OtherTensorsError(WeightSyncError):
    """The tensors are not those of the previous version."""


class Gathering:
    """One version. `take` iterates its tensors once, in order; another thread may call the other methods meanwhile."""

    def __init__(self, staging: "Staging", tensors: Iterable[Named], places: Places | None) -> None:
        self._staging = staging
        self._tensors = iter(tensors)
        self._places = places
        self._changed = threading.Condition()
        self._full: list[torch.cuda.Event | None] = []
        """An entry for each full bucket; where it is an event, the bucket is full once that has happened."""
        self._is_other = False
        self._is_over = False
        self._staged: StagedWeights | None = None

    def take(self) -> None:
        """Take all tensors, which may change afterwards; a second call does nothing. Raises WeightSyncError for tensors
        that cannot be sent."""
        if self._is_over:
            return
        try:
            self._staged = self._staging.stage(self._tensors) if self._places is None else self._fill(self._places)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def places(self) -> Places:
        """Return the places of the tensors: at once from the previous version, or else once all tensors are taken."""
        return self._staged or self._places or self.staged()

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket as soon as it is full; every further call yields all of them again. Raises
        OtherTensorsError once a tensor does not fit `places`: the tensors then have other places, which `staged`
        returns."""
        if self._places is None:
            yield from self.staged().buckets
            return
        for index, bucket in enumerate(self._places.buckets):
            self._until(functools.partial(self._is_settled, index))
            if self._is_other:
                raise OtherTensorsError(_OTHER)
            if (filled := self._full[index]) is not None:
                torch.cuda.current_stream(bucket.device).wait_event(filled)
            yield bucket

    def staged(self) -> StagedWeights:
        """Wait until all tensors are taken, and return the staged version."""
        self._until(lambda: False)
        if self._staged is None:
            raise WeightSyncError(_FAILED)
        return self._staged

    def _is_settled(self, index: int) -> bool:
        return len(self._full) > index or self._is_other

    def _until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self._is_over)
            if self._is_over and self._staged is None:
                raise WeightSyncError(_FAILED)

    def _fill(self, places: Places) -> StagedWeights:
        fingerprints, taken = Fingerprints(places.tensors), list[Named]()
        last = len(places.buckets) - 1
        for index, bucket in enumerate(places.buckets):
            wanted = places.of(index)
            count, other = self._take_bucket(wanted, is_last=index == last)
            taken += wanted[:count]
            if count < len(wanted) or other:
                self._note(is_other=True)
                return self._staging.stage(itertools.chain(taken, other, self._tensors))
            self._note(full=_recorded(bucket))
            fingerprints.add(index, bucket)  # only now, while it is sent
        of_each = fingerprints.read()
        in_order = tuple(of_each[number] for number in range(len(places.tensors)))
        return StagedWeights(places.tensors, places.buckets, in_order)

    def _take_bucket(self, wanted: Sequence[Named], *, is_last: bool) -> tuple[int, tuple[Named, ...]]:
        """Copy the next tensors to their places, all together: one by one, thousands of small ones would take longer
        than sending them. Returns how many were the wanted ones, and the tensor that was not, if any."""
        sources: list[torch.Tensor] = []
        other: tuple[Named, ...] = ()
        try:
            for name, view in wanted:
                given = next(self._tensors, None)
                if given is None or not _fits(given, name, view):
                    other = () if given is None else (given,)
                    break
                sources.append(given[1].detach())
            if is_last and len(sources) == len(wanted) and (given := next(self._tensors, None)) is not None:
                other = (given,)
        finally:
            if sources:
                taken = [view for _, view in wanted[: len(sources)]]
                torch._foreach_copy_(taken, sources, non_blocking=taken[0].is_cuda)
        return len(sources), other

    def _note(self, *, full: torch.cuda.Event | None = None, is_other: bool = False) -> None:
        with self._changed:
            self._is_other = is_other
            if not is_other:
                self._full.append(full)
            self._changed.notify_all()


def _recorded(bucket: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event that happens once all work that this thread has begun on the bucket is done; None: it is done."""
    if not bucket.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(bucket.device))
    return event


def _fits(given: Named, name: str, view: torch.Tensor) -> bool:
    return given[0] == name and given[1].shape == view.shape and given[1].dtype == view.dtype


class Staging:
    """The memory in which a model's versions are gathered, one after another."""

    def __init__(self, bucket_bytes: int, device: torch.device, *, memory_is_reused: bool) -> None:
        """`memory_is_reused`: each version overwrites the previous one, as there is room for one only."""
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._memory_is_reused = memory_is_reused
        self._places: Places | None = None

    def begin(self, tensors: Iterable[Named]) -> Gathering:
        """Begin the next version, one at a time. Takes no tensor yet. Raises NoRoomError."""
        if self._places is not None and not self._memory_is_reused:
            self._places = Places(self._places.tensors, allocate(self._places.sizes, self._device))
        return Gathering(self, tensors, self._places)

    def stage(self, tensors: Iterable[Named]) -> StagedWeights:
        """Stage tensors of any names and shapes in new memory. The next version is expected to have the same ones."""
        self._places = staged = stage(tensors, self._bucket_bytes, self._device)
        return staged
