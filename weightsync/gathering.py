"""A version on its way into buckets. Where its tensors go is known from the version before, so that the first buckets
can be sent while the last ones are gathered; the first version, and one of other tensors, is staged whole.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from broker.errors import WeightSyncError

from .buckets import Fingerprints, allocate
from .staging import Named, Places, StagedWeights, stage

_OTHER = "other tensors are published than in the version before"


class OtherTensorsError(WeightSyncError):
    """The tensors are not those of the version before."""


class Gathering:
    """One version. Its tensors are iterated once, in order, and may change once `finish` has returned."""

    def __init__(self, staging: "Staging", tensors: Iterable[Named], places: Places | None) -> None:
        self._staging = staging
        self._tensors = iter(tensors)
        self._places = places
        self._staged: StagedWeights | None = None
        self._taken: list[Named] = []
        self._other: Named | None = None
        self._is_other = places is None
        self._has_begun = False
        self._filling = self._fill(places) if places is not None else iter(())

    def layout(self) -> Places:
        """What will be there; everything is gathered first where that is not known."""
        return self._staged or self._places or self.finish()

    def buckets(self) -> Iterator[torch.Tensor]:
        """Each as soon as it is full; all of them again in every further call. Raises OtherTensorsError once a tensor
        is not what `layout` said: some other layout holds then, after `finish`."""
        if self._has_begun:
            self.finish()  # somebody stopped in the middle
        self._has_begun = True
        if self._staged is not None:
            if self._places is not None and self._is_other:
                raise OtherTensorsError(_OTHER)
            yield from self._staged.data
            return
        for bucket in self._filling:  # noqa: UP028 - whoever stops here must not stop that: `finish` does the rest
            yield bucket

    def finish(self) -> StagedWeights:
        """All of it, gathered to the end, whatever became of those who wanted the buckets. Raises WeightSyncError for
        tensors that cannot be sent."""
        if self._staged is None:
            try:
                for _ in self._filling:
                    pass
            except OtherTensorsError:
                pass
            if self._is_other:
                first = () if self._other is None else (self._other,)
                self._staged = self._staging.stage(itertools.chain(self._taken, first, self._tensors))
            if self._staged is None:
                raise WeightSyncError("the tensors of this version could not be gathered")
        return self._staged

    def _fill(self, places: Places) -> Iterator[torch.Tensor]:
        fingerprints = Fingerprints(places.tensors)
        last = len(places.data) - 1
        for index, bucket in enumerate(places.data):
            self._take(places.of(index), is_last=index == last)
            yield bucket
            fingerprints.add(index, bucket)  # only now, while it is sent
        of_each = fingerprints.read()
        in_order = tuple(of_each[number] for number in range(len(places.tensors)))
        self._staged = StagedWeights(places.tensors, places.data, in_order)

    def _take(self, wanted: Sequence[Named], *, is_last: bool) -> None:
        """The next tensors to their places, at once: one by one, thousands of small ones would take longer than the
        wire."""
        sources: list[torch.Tensor] = []
        try:
            for name, view in wanted:
                given = next(self._tensors, None)
                if given is None or not _fits(given, name, view):
                    raise self._others(given)
                sources.append(given[1].detach())
            if is_last and (given := next(self._tensors, None)) is not None:
                raise self._others(given)
        finally:
            taken = wanted[: len(sources)]
            if taken:
                torch._foreach_copy_([view for _, view in taken], sources, non_blocking=taken[0][1].is_cuda)
            self._taken += taken

    def _others(self, first: Named | None) -> OtherTensorsError:
        self._is_other, self._other = True, first
        return OtherTensorsError(_OTHER)


def _fits(given: Named, name: str, view: torch.Tensor) -> bool:
    return given[0] == name and given[1].shape == view.shape and given[1].dtype == view.dtype


class Staging:
    """Where a model's versions are gathered, one after another."""

    def __init__(self, bucket_bytes: int, device: torch.device, *, reuses_memory: bool) -> None:
        """`reuses_memory`: there is room for one version, the one before is gone."""
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._reuses_memory = reuses_memory
        self._places: Places | None = None

    def begin(self, tensors: Iterable[Named]) -> Gathering:
        """One at a time. Takes no tensor yet. Raises NoRoomError."""
        if self._places is not None and not self._reuses_memory:
            self._places = Places(self._places.tensors, allocate(self._places.buckets, self._device))
        return Gathering(self, tensors, self._places)

    def stage(self, tensors: Iterable[Named]) -> StagedWeights:
        """Of whatever names and shapes, into other memory; the next version is expected to have the same."""
        self._places = staged = stage(tensors, self._bucket_bytes, self._device)
        return staged
