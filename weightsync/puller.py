"""Fetches announced versions for one worker: by deltas from the one fetched before, where it is kept, else whole.

Whatever goes wrong with deltas, the whole version is fetched in the same call; and what comes out is compared with
the manifest's digests either way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from broker.errors import WeightSyncError
from broker.schema import DeltaSpec, WeightManifest

from .buckets import verify
from .chain import chain_from
from .deadline import Deadline
from .deltas import apply
from .transports.base import PullTransport

Buckets = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pulled:
    """A version's buckets, verified, and how they came."""

    buckets: Buckets
    deltas: int
    """0: it was fetched whole."""
    failure: str
    """Empty, or why deltas were of no use."""


class Puller:
    """One call at a time. With `keeps_base` the newest version's buckets stay in host memory."""

    def __init__(self, transport: PullTransport, keeps_base: bool) -> None:
        self._transport = transport
        self._keeps_base = keeps_base
        self._base: tuple[WeightManifest, Buckets] | None = None
        self.fetched_bytes = 0
        """Since the start, deltas that turned out useless included."""

    def pull(self, manifest: WeightManifest, deadline: Deadline) -> Pulled:
        """All of `manifest`'s version. Blocks; raises what PullTransport.pull does."""
        pulled = self._pull(manifest, deadline)
        if self._keeps_base:
            self._base = manifest, pulled.buckets
        return pulled

    def _pull(self, manifest: WeightManifest, deadline: Deadline) -> Pulled:
        chain = chain_from(self._base[0], manifest) if self._base else ()
        failure = ""
        if self._base and chain:
            try:
                return Pulled(self._patched(self._base[1], manifest, chain, deadline), len(chain), "")
            except WeightSyncError as error:
                failure = f"{len(chain)} deltas were of no use, it was fetched whole: {error}"
        whole = self._transport.pull(manifest, deadline)
        self.fetched_bytes += sum(bucket.nbytes for bucket in manifest.buckets)
        return Pulled(whole, 0, failure)

    def _patched(
        self, base: Buckets, manifest: WeightManifest, chain: tuple[DeltaSpec, ...], deadline: Deadline
    ) -> Buckets:
        buckets = apply(base, manifest.tensors, self._fetched(manifest, chain, deadline))
        for index, (spec, bucket) in enumerate(zip(manifest.buckets, buckets, strict=True)):
            verify(index, spec, bucket)
        return buckets

    def _fetched(
        self, manifest: WeightManifest, chain: tuple[DeltaSpec, ...], deadline: Deadline
    ) -> Iterator[memoryview]:
        """One at a time, so that no more than one is in memory."""
        for delta in chain:
            data = self._transport.pull_delta(manifest, delta, deadline)
            self.fetched_bytes += len(data)
            yield data
