"""Fetches announced versions for one worker: deltas bring the buckets that it holds of an earlier version up to date,
and the other buckets come whole.

Over a slow line a version may be superseded before all of its buckets have come. The puller keeps those that have, so
that the next pull goes on instead of starting over. Where a delta turns out to be wrong, the same call fetches all
buckets. Either way the result is compared with the manifest's fingerprints.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, TensorSpec, WeightManifest
from headway.weightsync.deadline import Deadline
from headway.weightsync.tensors.buckets import allocate, check_manifest, verify
from headway.weightsync.tensors.chain import chain_from
from headway.weightsync.tensors.deltas import patch
from headway.weightsync.transports.base import PullTransport, SupersededError, UnreachableError
from headway.weightsync.transports.threads import all_of

AT_ONCE = 4
"""Connections of one pull. A single one does not fill the line: each bucket is copied, sent, copied and verified."""


@dataclass(frozen=True)
class Pulled:
    """A version's buckets, verified, and how they came."""

    buckets: tuple[torch.Tensor, ...]
    deltas: int
    """Deltas that were applied; 0: all buckets were fetched whole."""
    failure: str
    """Why deltas were of no use, or ""."""


@dataclass(frozen=True)
class _Base:
    """Verified buckets of one version, by index; some are missing where the next version came too soon."""

    version: WeightVersion
    layout: tuple[tuple[TensorSpec, ...], tuple[int, ...]]
    buckets: dict[int, torch.Tensor]


class Puller:
    """Pulls versions, one call at a time. With `keeps_base` the newest version's buckets stay in host memory."""

    def __init__(self, transport: PullTransport, keeps_base: bool) -> None:
        self._transport = transport
        self._keeps_base = keeps_base
        self._held: _Base | None = None

    def pull(
        self, manifest: WeightManifest, deadline: Deadline, landing: Sequence[torch.Tensor] | None = None
    ) -> Pulled:
        """Fetch all of `manifest`'s version, and block until it is there. Raises what PullTransport raises; the next
        call then goes on.

        Buckets that are fetched whole go into `landing`, if it is given. It must not be given with `keeps_base`.
        """
        check_manifest(manifest)
        try:
            return self._pull(manifest, deadline, landing)
        finally:
            self._transport.forget()

    def _pull(self, manifest: WeightManifest, deadline: Deadline, landing: Sequence[torch.Tensor] | None) -> Pulled:
        chain = self._chain_to(manifest)
        buckets, failure = self._patched(manifest, chain, deadline)
        self._keep(manifest, buckets)
        missing = {
            index: allocate([nbytes])[0] if landing is None else landing[index]
            for index, nbytes in enumerate(manifest.buckets)
            if index not in buckets
        }
        for index in self._fetch(manifest, missing, deadline):
            buckets[index] = missing[index]
            self._keep(manifest, buckets)
        whole = tuple(buckets[index] for index in range(len(manifest.buckets)))
        return Pulled(whole, 0 if failure else len(chain), failure)

    def _fetch(
        self, manifest: WeightManifest, missing: Mapping[int, torch.Tensor], deadline: Deadline
    ) -> Iterator[int]:
        """Fill the `missing` buckets and yield the index of each once it is there: one after another with `keeps_base`,
        several at a time otherwise, as then nothing is kept of a pull that is cut off."""
        if self._keeps_base:
            for index, bucket in missing.items():
                self._transport.pull_bucket(manifest, index, bucket, deadline)
                yield index
            return
        fetching = [
            partial(self._transport.pull_bucket, manifest, index, bucket, deadline) for index, bucket in missing.items()
        ]
        all_of("pull", AT_ONCE, fetching, deadline)  # no thread may still write to buckets that are used next
        yield from missing

    def _chain_to(self, manifest: WeightManifest) -> tuple[DeltaSpec, ...]:
        """Return the deltas from the held version to `manifest`'s. Where there is no such chain, or it would save
        nothing, the held version is forgotten."""
        held = self._held
        if held is None:
            return ()
        chain = chain_from(held.version, manifest)
        is_on_the_way = bool(chain) or held.version == manifest.version
        is_saving = sum(delta.nbytes for delta in chain) < sum(bucket.numel() for bucket in held.buckets.values())
        if held.layout == _layout(manifest) and is_on_the_way and is_saving:
            return chain
        self._held = None
        return ()

    def _patched(
        self, manifest: WeightManifest, chain: tuple[DeltaSpec, ...], deadline: Deadline
    ) -> tuple[dict[int, torch.Tensor], str]:
        """Return the held buckets, brought up to `manifest`'s version, and what went wrong, or "". The held ones stay
        as they are: an engine may be reading them."""
        if self._held is None:
            return {}, ""
        buckets = {index: _copy(bucket) if chain else bucket for index, bucket in self._held.buckets.items()}
        try:
            for delta in chain:
                patch(buckets, manifest.tensors, self._transport.pull_delta(manifest, delta, deadline))
            verify(manifest, buckets)
        except (SupersededError, UnreachableError):
            raise  # the held buckets are still good
        except MemoryError as error:
            raise NoRoomError(f"no memory to patch what is held to version {manifest.version}") from error
        except WeightSyncError as error:
            deadline.check("pull")
            self._held = None
            return {}, f"deltas were of no use, all of it was fetched: {error}"
        return buckets, ""

    def _keep(self, manifest: WeightManifest, buckets: dict[int, torch.Tensor]) -> None:
        """Keep `buckets` as the base. Called after every bucket, as the version may be superseded before the next."""
        if self._keeps_base and buckets:
            self._held = _Base(manifest.version, _layout(manifest), dict(buckets))


def _copy(bucket: torch.Tensor) -> torch.Tensor:
    return allocate([bucket.numel()])[0].copy_(bucket)


def _layout(manifest: WeightManifest) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Return where every tensor lies, and the buckets' sizes, to compare two versions."""
    return manifest.tensors, manifest.buckets
