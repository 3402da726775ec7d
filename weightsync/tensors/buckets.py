"""Flat byte buckets, on a CPU or a GPU: where tensors lie in them, and whether they are those that were staged.

Every tensor begins at a multiple of `ALIGNMENT` bytes, so views of received buckets are usable tensors without a copy,
and a bucket is rows of so many bytes, of which all its tensors' fingerprints are made at once.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from broker.errors import NoRoomError, WeightSyncError
from broker.schema import TensorSpec, WeightManifest

from .fingerprint import MODULUS, UNSIGNED, MatrixParts, fingerprint_parts

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


def digest_bytes(data: bytes | memoryview) -> str:
    """blake2b, 16 bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def as_bytes(bucket: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 CPU tensor."""
    return bucket.numpy().data


def allocate(sizes: Sequence[int], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Buckets with anything in them. Raises NoRoomError."""
    try:
        return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    except RuntimeError as error:  # torch has a class of its own only for memory of a GPU
        raise NoRoomError(
            f"no memory on {device} for {sum(sizes)} bytes of weights: {str(error).partition(chr(10))[0]}; on a GPU"
            " lower engine.options.gpu_memory_utilization or set weights.staging=host"
        ) from error


def verify(manifest: WeightManifest, buckets: Mapping[int, torch.Tensor]) -> None:
    """Raise WeightSyncError unless these of the version's buckets hold the tensors that were staged."""
    for index, bucket in buckets.items():
        if bucket.numel() != manifest.buckets[index]:
            raise WeightSyncError(
                f"bucket {index} arrived with {bucket.numel()} bytes, published were {manifest.buckets[index]}"
            )
    compare(manifest, fingerprints(manifest.tensors, buckets))


def compare(manifest: WeightManifest, fingerprints: Mapping[int, int]) -> None:
    """Raise WeightSyncError unless these, by the tensors' places, are the published ones."""
    for place, found in fingerprints.items():
        spec, published = manifest.tensors[place], manifest.fingerprints[place]
        if found != published:
            raise WeightSyncError(
                f"{spec.name} in bucket {spec.bucket} arrived damaged: its fingerprint is {found}, published was "
                f"{published}; the bucket is fetched again"
            )


def fingerprints(specs: Sequence[TensorSpec], buckets: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """The fingerprint of every tensor that lies in one of `buckets`, by its place in `specs`."""
    of_each = Fingerprints(specs)
    for index, bucket in buckets.items():
        of_each.add(index, bucket)
    return of_each.read()


class Fingerprints:
    """Fingerprints of one version's tensors, computed bucket by bucket; a GPU is waited for only by `read`."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._runs: dict[torch.device, Mapping[int, Sequence[_Run]]] = {}
        self._sums: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def add(self, index: int, bucket: torch.Tensor) -> None:
        """Compute those of the tensors in bucket number `index`, from its bytes as they are now."""
        if bucket.device not in self._runs:
            self._runs[bucket.device] = _runs(self._specs, bucket.device)
        for run in self._runs[bucket.device].get(index, ()):
            rows_RC = bucket.view(UNSIGNED[run.width]).view(-1, ALIGNMENT // run.width)
            self._sums.append((run.places, fingerprint_parts([rows_RC], run.parts)))

    def read(self) -> dict[int, int]:
        """By the tensors' places in the specs, of all buckets so far."""
        sums = [(places, added.tolist()) for places, added in self._sums]
        return {place: number % MODULUS for places, added in sums for place, number in zip(places, added, strict=True)}


class _Run(NamedTuple):
    """Tensors of one bucket whose elements are `width` bytes wide."""

    width: int
    places: tuple[int, ...]
    """In the specs."""
    parts: MatrixParts


@functools.lru_cache(maxsize=4)
def _runs(specs: tuple[TensorSpec, ...], device: torch.device) -> Mapping[int, Sequence[_Run]]:
    """By bucket; the same for all versions of a model."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, spec in enumerate(specs):
        places.setdefault((spec.bucket, DTYPES[spec.dtype].itemsize), []).append(place)
    runs: dict[int, list[_Run]] = {}
    for (bucket, width), some in places.items():
        parts = MatrixParts.of([_part(specs[place], width) for place in some], device)
        runs.setdefault(bucket, []).append(_Run(width, tuple(some), parts))
    return runs


def _part(spec: TensorSpec, width: int) -> tuple[int, int, int, int, int]:
    first, end = spec.offset // ALIGNMENT, aligned(spec.offset + spec.nbytes) // ALIGNMENT
    return first, end, 0, ALIGNMENT // width, 1


def views(
    specs: Iterable[TensorSpec], data: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """The named tensors inside `data`, without a copy."""
    typed: dict[tuple[int, str], torch.Tensor] = {}
    found = []
    for spec in specs:
        flat = typed.get((spec.bucket, spec.dtype))
        if flat is None:
            flat = typed[spec.bucket, spec.dtype] = data[spec.bucket].view(DTYPES[spec.dtype])
        width = flat.itemsize
        found.append((spec.name, flat.narrow(0, spec.offset // width, spec.nbytes // width).view(spec.shape)))
    return found


def check_manifest(manifest: WeightManifest) -> None:
    """Raise WeightSyncError unless every tensor has a fingerprint and lies inside of its bucket."""
    if len(manifest.fingerprints) != len(manifest.tensors):
        raise WeightSyncError(f"the manifest of version {manifest.version} contradicts itself")
    check_offer(manifest)


def check_offer(manifest: WeightManifest) -> None:
    """Raise WeightSyncError unless every tensor lies inside of its bucket; fingerprints follow the buckets."""
    sizes = manifest.buckets
    if any(size < 0 or size % ALIGNMENT for size in sizes):
        raise WeightSyncError(f"the manifest of version {manifest.version} contradicts itself")
    for spec in manifest.tensors:
        if not 0 <= spec.bucket < len(sizes) or not _is_sized(spec):
            raise WeightSyncError(f"the manifest contradicts itself about tensor {spec.name}: {spec}")
        if spec.offset % ALIGNMENT or not 0 <= spec.offset <= sizes[spec.bucket] - spec.nbytes:
            raise WeightSyncError(
                f"tensor {spec.name} lies outside of its bucket of {sizes[spec.bucket]} bytes: {spec}"
            )


def _is_sized(spec: TensorSpec) -> bool:
    """It says truly how many bytes a tensor of its shape has. Two dimensions below 0 have a product like any other."""
    dtype = DTYPES.get(spec.dtype)
    return (
        dtype is not None
        and all(dimension >= 0 for dimension in spec.shape)
        and spec.nbytes == math.prod(spec.shape) * dtype.itemsize
    )


def aligned(nbytes: int) -> int:
    """Rounded up to whole rows."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor inside its bucket."""
    return bucket[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
