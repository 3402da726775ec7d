"""Copies named tensors into bounded flat byte buckets, bit for bit, which the learner publishes."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import TensorSpec

from .buckets import DTYPES, aligned, allocate, fingerprints, view, views
from .fingerprint import MODULUS, fingerprint_sum

Named = tuple[str, torch.Tensor]


@dataclass
class Places:
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
class StagedWeights(Places):
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
