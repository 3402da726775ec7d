"""Flat byte buckets, on a CPU or a GPU: where tensors lie in them, and checks that they hold the tensors that were
staged.

Every tensor begins at a multiple of `ALIGNMENT` bytes, so views of received buckets are usable tensors without a copy.
A bucket consists of rows of `ALIGNMENT` bytes, from which the fingerprints of all its tensors are computed together.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema.weights import TensorSpec, WeightManifest

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
    """Return the blake2b digest of `data`, 16 bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sha256_of(bucket: torch.Tensor) -> str:
    """Return the SHA-256 digest of a flat uint8 tensor on any device, in hexadecimal."""
    return hashlib.sha256(as_bytes(bucket.cpu())).hexdigest()


def as_bytes(bucket: torch.Tensor) -> memoryview:
    """Return the memory of a flat uint8 CPU tensor."""
    return bucket.numpy().data


def allocate(sizes: Sequence[int], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return uninitialised buckets of these sizes in bytes. Raises NoRoomError."""
    try:
        return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    except RuntimeError as error:  # torch has an own error class only for GPU memory
        raise NoRoomError(
            f"no memory on {device} for {sum(sizes)} bytes of weights: {str(error).partition(chr(10))[0]}; on a GPU"
            " lower engine.options.gpu_memory_utilization or set weights.staging=host"
        ) from error


def verify(manifest: WeightManifest, buckets: Mapping[int, torch.Tensor]) -> None:
    """Raise WeightSyncError unless `buckets`, by index, hold the tensors that the learner staged: by their digests
    where the manifest has any, else by their fingerprints."""
    for index, bucket in buckets.items():
        if bucket.numel() != manifest.buckets[index]:
            raise WeightSyncError(
                f"bucket {index} arrived with {bucket.numel()} bytes, published were {manifest.buckets[index]}"
            )
    if not manifest.digests:
        compare(manifest, fingerprints(manifest.tensors, buckets))
        return
    for index, bucket in buckets.items():
        if (found := sha256_of(bucket)) != manifest.digests[index]:
            raise WeightSyncError(
                f"bucket {index} of version {manifest.version} was altered on its way: its digest is {found}, published"
                f" was {manifest.digests[index]}; it is fetched again"
            )


def compare(manifest: WeightManifest, fingerprints: Mapping[int, int]) -> None:
    """Raise WeightSyncError unless `fingerprints`, by the tensors' places, are the published ones."""
    for place, found in fingerprints.items():
        spec, published = manifest.tensors[place], manifest.fingerprints[place]
        if found != published:
            raise WeightSyncError(
                f"{spec.name} in bucket {spec.bucket} arrived damaged: its fingerprint is {found}, published was "
                f"{published}; the bucket is fetched again"
            )


def fingerprints(specs: Sequence[TensorSpec], buckets: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """Return the fingerprint of every tensor that lies in one of `buckets`, by its place in `specs`."""
    of_each = Fingerprints(specs)
    for index, bucket in buckets.items():
        of_each.add(index, bucket)
    return of_each.read()


class Fingerprints:
    """Fingerprints of one version's tensors, computed bucket by bucket. Only `read` waits for a GPU."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._width_groups: dict[torch.device, Mapping[int, Sequence[_WidthGroup]]] = {}
        self._sums: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def add(self, index: int, bucket: torch.Tensor) -> None:
        """Compute the fingerprints of the tensors in bucket number `index`, from its bytes as they are now."""
        if bucket.device not in self._width_groups:
            self._width_groups[bucket.device] = _by_width(self._specs, bucket.device)
        for group in self._width_groups[bucket.device].get(index, ()):
            rows_RC = bucket.view(UNSIGNED[group.width]).view(-1, ALIGNMENT // group.width)
            self._sums.append((group.places, fingerprint_parts([rows_RC], group.parts)))

    def read(self) -> dict[int, int]:
        """Return the fingerprints of all buckets so far, by the tensors' places in the specs."""
        sums = [(places, added.tolist()) for places, added in self._sums]
        return {place: number % MODULUS for places, added in sums for place, number in zip(places, added, strict=True)}


class _WidthGroup(NamedTuple):
    """The tensors of one bucket whose elements are `width` bytes wide."""

    width: int
    places: tuple[int, ...]
    """The tensors' places in the specs."""
    parts: MatrixParts


@functools.lru_cache(maxsize=4)
def _by_width(specs: tuple[TensorSpec, ...], device: torch.device) -> Mapping[int, Sequence[_WidthGroup]]:
    """Return the width groups of each bucket. They are the same for all versions of a model."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, spec in enumerate(specs):
        places.setdefault((spec.bucket, DTYPES[spec.dtype].itemsize), []).append(place)
    groups: dict[int, list[_WidthGroup]] = {}
    for (bucket, width), some in places.items():
        parts = MatrixParts.of([_part(specs[place], width) for place in some], device)
        groups.setdefault(bucket, []).append(_WidthGroup(width, tuple(some), parts))
    return groups


def _part(spec: TensorSpec, width: int) -> tuple[int, int, int, int, int]:
    first, end = spec.offset // ALIGNMENT, aligned(spec.offset + spec.nbytes) // ALIGNMENT
    return first, end, 0, ALIGNMENT // width, 1


def views(
    specs: Iterable[TensorSpec], data: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors inside `data`, without a copy."""
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
    """Raise WeightSyncError unless every tensor has a fingerprint and lies inside its bucket, and all buckets or none
    have a digest."""
    are_signed = len(manifest.digests) in (0, len(manifest.buckets))
    if len(manifest.fingerprints) != len(manifest.tensors) or not are_signed:
        raise WeightSyncError(f"the manifest of version {manifest.version} contradicts itself")
    check_offer(manifest)


def check_offer(manifest: WeightManifest) -> None:
    """Raise WeightSyncError unless every tensor lies inside its bucket. Fingerprints come only after the buckets."""
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
    """Return whether `nbytes` fits the shape. Each dimension is checked: two negative ones multiply to a positive."""
    dtype = DTYPES.get(spec.dtype)
    return (
        dtype is not None
        and all(dimension >= 0 for dimension in spec.shape)
        and spec.nbytes == math.prod(spec.shape) * dtype.itemsize
    )


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole rows."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return one tensor inside its bucket, as a view."""
    return bucket[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
