"""Named tensors <-> bounded flat byte buckets, each with a digest, bit for bit.

Every tensor begins at a multiple of 16 bytes, so views of received buckets are usable tensors without a copy.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from broker.errors import WeightSyncError
from broker.schema import BucketSpec, TensorSpec

from .fingerprint import fingerprint

ALIGNMENT = 16

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
    """One version's tensors as bytes on the CPU, with the specs that a manifest carries."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...]
    data: tuple[torch.Tensor, ...]
    """uint8, one flat tensor per bucket."""
    fingerprints: tuple[int, ...]
    """One per tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass
class BucketFiller:
    """Appends tensors to the last bucket while they fit; each is copied at once: its source may be reused."""

    bucket_bytes: int
    specs: list[TensorSpec] = field(default_factory=list)
    data: list[torch.Tensor] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` in; one larger than `bucket_bytes` gets a bucket of its own."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WeightSyncError(f"tensor {name} has dtype {dtype}, which cannot be sent; known: {', '.join(DTYPES)}")
        nbytes = tensor.numel() * tensor.element_size()
        bucket, offset = self._reserve(nbytes)
        self.specs.append(TensorSpec(name, dtype, tuple(tensor.shape), bucket, offset, nbytes))
        self.fingerprints.append(fingerprint(tensor))
        _view(self.data[bucket], self.specs[-1]).copy_(tensor.detach())

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        if self.data:
            offset = -(-self.used[-1] // ALIGNMENT) * ALIGNMENT
            if offset + nbytes <= self.data[-1].numel():
                self.data[-1][self.used[-1] : offset] = 0  # padding is digested too
                self.used[-1] = offset + nbytes
                return len(self.data) - 1, offset
        # Pages that stay untouched are never committed by the system, so a mostly empty bucket costs nothing.
        self.data.append(torch.empty(max(nbytes, self.bucket_bytes), dtype=torch.uint8))
        self.used.append(nbytes)
        return len(self.data) - 1, 0

    def finish(self) -> StagedWeights:
        """Trim the buckets and digest them."""
        data = tuple(bucket[:used] for bucket, used in zip(self.data, self.used, strict=True))
        buckets = tuple(BucketSpec(bucket.numel(), digest(bucket)) for bucket in data)
        return StagedWeights(tuple(self.specs), buckets, data, tuple(self.fingerprints))


def stage(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> StagedWeights:
    """Copy named tensors, from any device, into CPU buckets; only a single tensor exceeds `bucket_bytes`."""
    filler = BucketFiller(bucket_bytes)
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise WeightSyncError(f"tensor {name} is published twice in one version; names must be unique")
        names.add(name)
        filler.add(name, tensor)
    return filler.finish()


def digest(bucket: torch.Tensor) -> str:
    """blake2b of a flat uint8 CPU tensor, 16 bytes in hexadecimal."""
    return digest_bytes(as_bytes(bucket))


def digest_bytes(data: bytes | memoryview) -> str:
    """blake2b, 16 bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def as_bytes(bucket: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 CPU tensor."""
    return bucket.numpy().data


def allocate(buckets: Iterable[BucketSpec]) -> tuple[torch.Tensor, ...]:
    """Empty buckets to receive into."""
    return tuple(torch.empty(bucket.nbytes, dtype=torch.uint8) for bucket in buckets)


def verify(index: int, spec: BucketSpec, bucket: torch.Tensor) -> None:
    """Raise WeightSyncError unless these are the bytes that were staged."""
    found = digest(bucket)
    if bucket.numel() != spec.nbytes or found != spec.digest:
        raise WeightSyncError(
            f"bucket {index} arrived damaged: {bucket.numel()} bytes with digest {found}, "
            f"published were {spec.nbytes} bytes with digest {spec.digest}; it is fetched again"
        )


def views(specs: Iterable[TensorSpec], data: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The named tensors inside `data`, without a copy."""
    specs = tuple(specs)
    check_specs(specs, [bucket.numel() for bucket in data])
    return [(spec.name, _view(data[spec.bucket], spec)) for spec in specs]


def check_specs(specs: Iterable[TensorSpec], sizes: Sequence[int]) -> None:
    """Raise WeightSyncError unless every tensor lies inside of its bucket; `sizes` are the buckets', in bytes."""
    for spec in specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or not 0 <= spec.bucket < len(sizes) or spec.nbytes != math.prod(spec.shape) * dtype.itemsize:
            raise WeightSyncError(f"the manifest contradicts itself about tensor {spec.name}: {spec}")
        if spec.offset % ALIGNMENT or not 0 <= spec.offset <= sizes[spec.bucket] - spec.nbytes:
            raise WeightSyncError(
                f"tensor {spec.name} lies outside of its bucket of {sizes[spec.bucket]} bytes: {spec}"
            )


def _view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return bucket[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
