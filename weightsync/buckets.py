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
    first, end = spec.offset // ALIGNMENT, aligned(spec.offset + spec.nbytes) // ALIGNMENT
    return first, end, 0, ALIGNMENT // width, 1


def views(specs: Iterable[TensorSpec], data: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The named tensors inside `data`, without a copy."""
    return [(spec.name, view(data[spec.bucket], spec)) for spec in specs]


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


def aligned(nbytes: int) -> int:
    """Rounded up to whole rows."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor inside its bucket."""
    return bucket[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
