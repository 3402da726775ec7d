"""Named tensors <-> bounded flat byte buckets, bit for bit, on a CPU or a GPU.

Every tensor begins at a multiple of `ALIGNMENT` bytes, so views of received buckets are usable tensors without a copy,
and a bucket is rows of so many bytes, of which all its tensors' fingerprints are made at once.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from broker.errors import NoRoomError, WeightSyncError
from broker.schema import TensorSpec, WeightManifest

from .fingerprint import MODULUS, UNSIGNED, Parts, fingerprint_parts

ALIGNMENT = 256

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass
class StagedWeights:
    """One version's tensors as bytes, with what a manifest says of them."""

    tensors: tuple[TensorSpec, ...]
    data: tuple[torch.Tensor, ...]
    """uint8, one flat tensor per bucket, all on one device."""
    fingerprints: tuple[int, ...]
    """One per tensor."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Their sizes in bytes."""
        return tuple(bucket.numel() for bucket in self.data)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(self.buckets)

    def on_cpu(self) -> "StagedWeights":
        """Itself, or a copy."""
        return StagedWeights(self.tensors, tuple(bucket.cpu() for bucket in self.data), self.fingerprints)


@dataclass
class BucketFiller:
    """Appends tensors to the last bucket while they fit; each is copied at once: its source may be reused."""

    bucket_bytes: int
    device: torch.device
    specs: list[TensorSpec] = field(default_factory=list)
    data: list[torch.Tensor] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` in; one larger than `bucket_bytes` gets a bucket of its own."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WeightSyncError(f"tensor {name} has dtype {dtype}, which cannot be sent; known: {', '.join(DTYPES)}")
        nbytes = tensor.numel() * tensor.element_size()
        bucket, offset = self._reserve(nbytes)
        self.specs.append(TensorSpec(name, dtype, tuple(tensor.shape), bucket, offset, nbytes))
        _view(self.data[bucket], self.specs[-1]).copy_(tensor.detach(), non_blocking=self.device.type != "cpu")

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        if not self.data or self.used[-1] + nbytes > self.data[-1].numel():
            # Pages that stay untouched are never committed by the system, so a mostly empty bucket costs nothing.
            size = _aligned(max(nbytes, self.bucket_bytes))
            self.data.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self.used.append(0)
        offset, end = self.used[-1], self.used[-1] + nbytes
        self.used[-1] = _aligned(end)
        self.data[-1][end : self.used[-1]] = 0  # padding belongs to the rows that are fingerprinted
        return len(self.data) - 1, offset

    def finish(self) -> StagedWeights:
        """Trim the buckets and fingerprint what they hold."""
        data = tuple(bucket[:used] for bucket, used in zip(self.data, self.used, strict=True))
        of_each = fingerprints(self.specs, dict(enumerate(data)))
        return StagedWeights(tuple(self.specs), data, tuple(of_each[place] for place in range(len(self.specs))))


def stage(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, device: torch.device | str = "cpu"
) -> StagedWeights:
    """Copy named tensors, from any device, into buckets on `device`; only a single tensor exceeds `bucket_bytes`."""
    filler = BucketFiller(bucket_bytes, torch.device(device))
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise WeightSyncError(f"tensor {name} is published twice in one version; names must be unique")
        names.add(name)
        filler.add(name, tensor)
    return filler.finish()


class Restaging:
    """Stages a model's versions one after another into the same memory: the one before is gone."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._staged: StagedWeights | None = None
        self._views: list[tuple[str, torch.Tensor]] = []

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """As `stage` does; other tensors than last time get other memory."""
        tensors = iter(tensors)
        if self._staged is not None:
            done, rest = self._overwrite(tensors)
            if not rest and done == len(self._views):
                of_each = fingerprints(self._staged.tensors, dict(enumerate(self._staged.data)))
                return replace(self._staged, fingerprints=tuple(of_each[place] for place in range(done)))
            tensors = itertools.chain(self._views[:done], rest, tensors)
        self._staged = staged = stage(tensors, self._bucket_bytes, self._device)
        self._views = views(staged.tensors, staged.data)
        return staged

    def _overwrite(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> tuple[int, tuple[tuple[str, torch.Tensor], ...]]:
        """(how many were the same tensors as last time, the first that was not)"""
        for done, (known, view) in enumerate(self._views):
            given = next(tensors, None)
            if given is None:
                return done, ()
            name, tensor = given
            if name != known or tensor.shape != view.shape or tensor.dtype != view.dtype:
                return done, (given,)
            view.copy_(tensor.detach(), non_blocking=True)
        return len(self._views), tuple(itertools.islice(tensors, 1))


def digest_bytes(data: bytes | memoryview) -> str:
    """blake2b, 16 bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def as_bytes(bucket: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 CPU tensor."""
    return bucket.numpy().data


def allocate(sizes: Iterable[int], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Empty buckets to receive into. Raises NoRoomError."""
    sizes = tuple(sizes)
    try:
        return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    except RuntimeError as error:  # torch has a class of its own only for memory of a GPU
        first_line = str(error).partition("\n")[0]
        raise NoRoomError(f"no memory on {device} for {sum(sizes)} bytes of weights: {first_line}") from error


def verify(manifest: WeightManifest, buckets: Mapping[int, torch.Tensor]) -> None:
    """Raise WeightSyncError unless these of the version's buckets hold the tensors that were staged."""
    for index, bucket in buckets.items():
        if bucket.numel() != manifest.buckets[index]:
            raise WeightSyncError(
                f"bucket {index} arrived with {bucket.numel()} bytes, published were {manifest.buckets[index]}"
            )
    for place, found in fingerprints(manifest.tensors, buckets).items():
        spec, published = manifest.tensors[place], manifest.fingerprints[place]
        if found != published:
            raise WeightSyncError(
                f"{spec.name} in bucket {spec.bucket} arrived damaged: its fingerprint is {found}, published was "
                f"{published}; the bucket is fetched again"
            )


def fingerprints(specs: Sequence[TensorSpec], buckets: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """Of every tensor that lies in one of `buckets`, by its place in `specs`."""
    devices = {bucket.device for bucket in buckets.values()}
    found: list[tuple[tuple[int, ...], torch.Tensor]] = []
    for device in devices:
        for run in _runs(tuple(specs), device):
            if (bucket := buckets.get(run.bucket)) is not None:
                rows_RC = bucket.view(UNSIGNED[run.width]).view(-1, ALIGNMENT // run.width)
                found.append((run.places, fingerprint_parts(rows_RC, run.parts)))
    numbers = [(places, added.tolist()) for places, added in found]  # only now is a GPU waited for
    return {place: number % MODULUS for places, added in numbers for place, number in zip(places, added, strict=True)}


class _Run(NamedTuple):
    """Tensors of one bucket whose elements are `width` bytes wide."""

    bucket: int
    width: int
    places: tuple[int, ...]
    """In the specs."""
    parts: Parts


@functools.lru_cache(maxsize=4)
def _runs(specs: tuple[TensorSpec, ...], device: torch.device) -> tuple[_Run, ...]:
    """Made once for all versions of a model."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, spec in enumerate(specs):
        places.setdefault((spec.bucket, DTYPES[spec.dtype].itemsize), []).append(place)
    return tuple(
        _Run(bucket, width, tuple(some), Parts.of([_part(specs[place], width) for place in some], device))
        for (bucket, width), some in places.items()
    )


def _part(spec: TensorSpec, width: int) -> tuple[int, int, int, int, int]:
    first, end = spec.offset // ALIGNMENT, _aligned(spec.offset + spec.nbytes) // ALIGNMENT
    return first, end, 0, ALIGNMENT // width, 1


def views(specs: Iterable[TensorSpec], data: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The named tensors inside `data`, without a copy."""
    return [(spec.name, _view(data[spec.bucket], spec)) for spec in specs]


def check_manifest(manifest: WeightManifest) -> None:
    """Raise WeightSyncError unless every tensor has a fingerprint and lies inside of its bucket."""
    sizes = manifest.buckets
    if len(manifest.fingerprints) != len(manifest.tensors) or any(size % ALIGNMENT for size in sizes):
        raise WeightSyncError(f"the manifest of {manifest.version} contradicts itself")
    for spec in manifest.tensors:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or not 0 <= spec.bucket < len(sizes) or spec.nbytes != math.prod(spec.shape) * dtype.itemsize:
            raise WeightSyncError(f"the manifest contradicts itself about tensor {spec.name}: {spec}")
        if spec.offset % ALIGNMENT or not 0 <= spec.offset <= sizes[spec.bucket] - spec.nbytes:
            raise WeightSyncError(
                f"tensor {spec.name} lies outside of its bucket of {sizes[spec.bucket]} bytes: {spec}"
            )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return bucket[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
