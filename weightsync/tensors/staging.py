"""A version's tensors, copied bit for bit into bounded flat byte buckets, which the learner publishes.

The places of the tensors are known from the previous version, so the learner can send the first buckets while it
gathers the last ones; the first version, and one of other tensors, is staged whole before it is sent. Two threads meet
in a `Gathering`: the learner's own takes the tensors, as gathering them may be collective, and goes on training;
another one sends the buckets.

The frozen weights that adapters change are staged alike: they are published beside the versions, and fetched once by
each engine (`describe_base`, `manifest_of_base`).
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BaseWeights, TensorSpec, WeightManifest

from .buckets import DTYPES, Fingerprints, aligned, allocate, fingerprints, view, views
from .fingerprint import MODULUS, fingerprint_sum

Named = tuple[str, torch.Tensor]


@dataclass
class BucketLayout:
    """Buckets, and where a version's tensors go in them."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[torch.Tensor, ...]
    """uint8, flat, all on one device."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the buckets, in bytes."""
        return tuple(bucket.numel() for bucket in self.buckets)

    def of(self, index: int) -> list[Named]:
        """Return views for the tensors of one bucket, in order."""
        if index not in self._views:
            specs, bucket = self._specs[index], self.buckets[index]
            for spec in specs:
                end = spec.offset + spec.nbytes
                if end % aligned(1):
                    bucket[end : aligned(end)] = 0  # padding belongs to the rows that are fingerprinted
            self._views[index] = views(specs, self.buckets)
        return self._views[index]

    @cached_property
    def _views(self) -> dict[int, list[Named]]:
        return {}

    @cached_property
    def _specs(self) -> dict[int, tuple[TensorSpec, ...]]:
        return {index: tuple(some) for index, some in itertools.groupby(self.tensors, lambda spec: spec.bucket)}


@dataclass
class StagedWeights(BucketLayout):
    """One version's tensors as bytes in their places, with the entries of a manifest for them."""

    fingerprints: tuple[int, ...]
    """One fingerprint for each tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(self.sizes)

    def on_cpu(self) -> "StagedWeights":
        """Return this version in host memory: itself, or a copy."""
        return StagedWeights(self.tensors, tuple(bucket.cpu() for bucket in self.buckets), self.fingerprints)


@dataclass
class BucketFiller:
    """Appends tensors to the last bucket while they fit; each is copied at once: its source may be reused."""

    bucket_bytes: int
    device: torch.device
    specs: list[TensorSpec] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)
    """The fingerprints of tensors that come from a GPU into host memory: the GPU has added them up."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` in; one larger than `bucket_bytes` gets a bucket of its own."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WeightSyncError(f"tensor {name} has dtype {dtype}, which cannot be sent; known: {', '.join(DTYPES)}")
        nbytes = tensor.numel() * tensor.element_size()
        bucket, offset = self._reserve(nbytes)
        self.specs.append(TensorSpec(name, dtype, tuple(tensor.shape), bucket, offset, nbytes))
        if tensor.is_cuda and self.device.type == "cpu":
            self.sums.append(fingerprint_sum(tensor))
        view(self.buckets[bucket], self.specs[-1]).copy_(tensor.detach(), non_blocking=self.device.type != "cpu")

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        if not self.buckets or self.used[-1] + nbytes > self.buckets[-1].numel():
            # Pages that stay untouched are never committed by the system, so a mostly empty bucket costs nothing.
            size = aligned(max(nbytes, self.bucket_bytes))
            self.buckets += allocate([size], self.device)
            self.used.append(0)
        offset, end = self.used[-1], self.used[-1] + nbytes
        self.used[-1] = aligned(end)
        self.buckets[-1][end : self.used[-1]] = 0  # padding belongs to the rows that are fingerprinted
        return len(self.buckets) - 1, offset

    def finish(self) -> StagedWeights:
        """Trim the buckets, with the fingerprints of what they hold."""
        buckets = tuple(bucket[:used] for bucket, used in zip(self.buckets, self.used, strict=True))
        return StagedWeights(tuple(self.specs), buckets, self._fingerprints(buckets))

    def _fingerprints(self, buckets: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
        if self.sums and len(self.sums) == len(self.specs):
            return tuple(number % MODULUS for number in torch.stack(self.sums).tolist())
        of_each = fingerprints(self.specs, dict(enumerate(buckets)))
        return tuple(of_each[place] for place in range(len(self.specs)))


def stage(tensors: Iterable[Named], bucket_bytes: int, device: torch.device | str = "cpu") -> StagedWeights:
    """Copy named tensors, from any device, into buckets on `device`; only a single tensor exceeds `bucket_bytes`."""
    filler = BucketFiller(bucket_bytes, torch.device(device))
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise WeightSyncError(f"tensor {name} is published twice in one version; names must be unique")
        names.add(name)
        filler.add(name, tensor)
    return filler.finish()


_OTHER = "other tensors are published than in the version before"
_FAILED = "the tensors of this version could not be gathered"


class OtherTensorsError(WeightSyncError):
    """The tensors are not those of the previous version."""


class Gathering:
    """One version. `take` iterates its tensors once, in order; another thread may call the other methods meanwhile."""

    def __init__(self, staging: "Staging", tensors: Iterable[Named], places: BucketLayout | None) -> None:
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

    def places(self) -> BucketLayout:
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

    def _fill(self, places: BucketLayout) -> StagedWeights:
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
        self._places: BucketLayout | None = None

    def begin(self, tensors: Iterable[Named]) -> Gathering:
        """Begin the next version, one at a time. Takes no tensor yet. Raises NoRoomError."""
        if self._places is not None and not self._memory_is_reused:
            self._places = BucketLayout(self._places.tensors, allocate(self._places.sizes, self._device))
        return Gathering(self, tensors, self._places)

    def stage(self, tensors: Iterable[Named]) -> StagedWeights:
        """Stage tensors of any names and shapes in new memory. The next version is expected to have the same ones."""
        self._places = staged = stage(tensors, self._bucket_bytes, self._device)
        return staged


BASE = WeightVersion(0, 0)
"""Under which the learner serves them; a run's own versions have incarnations above 0."""


def describe_base(staged: StagedWeights, digests: tuple[str, ...] = ()) -> BaseWeights:
    """Return what an announcement says of them."""
    return BaseWeights(tensors=staged.tensors, buckets=staged.sizes, fingerprints=staged.fingerprints, digests=digests)


def manifest_of_base(announced: WeightManifest) -> WeightManifest:
    """Return a manifest by which they are pulled and verified like a version. `announced` must describe them."""
    base = announced.base
    assert base is not None
    return msgspec.structs.replace(
        announced,
        version=BASE,
        tensors=base.tensors,
        buckets=base.buckets,
        fingerprints=base.fingerprints,
        digests=base.digests,
        deltas=(),
        archived=None,
        adapter_scale=0.0,
        base=None,
    )
