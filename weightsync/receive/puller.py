"""Fetches announced versions for one worker: what it holds of earlier ones is brought up to date by deltas, the rest
comes whole.

Over a slow line a version may be superseded before all of its buckets came. Those that did are kept, so that the next
pull goes on instead of starting over. Where a delta turns out to be wrong, all buckets
are fetched in the same call; and what comes out is compared with the manifest's fingerprints either way.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from functools import partial

import torch

from broker.errors import NoRoomError, WeightSyncError
from broker.schema import DeltaSpec, TensorSpec, WeightManifest, WeightVersion
from weightsync.deadline import Deadline
from weightsync.tensors.buckets import allocate, check_manifest, verify
from weightsync.tensors.chain import chain_from
from weightsync.tensors.deltas import patch
from weightsync.transports.base import PullTransport, SupersededError, UnreachableError
from weightsync.transports.threads import DaemonPool

AT_ONCE = 4
"""Connections of one pull, which a single one does not fill: each bucket is copied, sent, copied and verified."""


@dataclass(frozen=True)
class Pulled:
    """A version's buckets, verified, and how they came."""

    buckets: tuple[torch.Tensor, ...]
    deltas: int
    """0: they were fetched whole."""
    failure: str
    """Empty, or why deltas were of no use."""


@dataclass(frozen=True)
class _Base:
    """Verified buckets of one version, by index; not all of them, where the next version came too soon."""

    version: WeightVersion
    layout: tuple[tuple[TensorSpec, ...], tuple[int, ...]]
    buckets: dict[int, torch.Tensor]


class Puller:
    """One call at a time. With `keeps_base` the newest version's buckets stay in host memory."""

    def __init__(self, transport: PullTransport, keeps_base: bool) -> None:
        self._transport = transport
        self._keeps_base = keeps_base
        self._held: _Base | None = None

    def pull(
        self, manifest: WeightManifest, deadline: Deadline, landing: Sequence[torch.Tensor] | None = None
    ) -> Pulled:
        """All of `manifest`'s version. Blocks; raises what PullTransport does, and then goes on in the next call.

        What is fetched whole goes into `landing`, if it is given, which one that keeps its base must not be.
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
        """Fill these buckets, one after another or, where nothing is kept of a version that is cut off, several at a
        time; yields each that is there."""
        if self._keeps_base:
            for index, bucket in missing.items():
                self._transport.pull_bucket(manifest, index, bucket, deadline)
                yield index
            return
        threads = DaemonPool("pull", AT_ONCE)
        fetching = [
            threads.submit(partial(self._transport.pull_bucket, manifest, index, bucket, deadline))
            for index, bucket in missing.items()
        ]
        threads.close()
        done, rest = wait(fetching, return_when=FIRST_EXCEPTION)
        failures = [error for fetched in done if (error := fetched.exception()) is not None]
        if failures:
            deadline.cancel()  # the others' bytes are of no more use
            for fetched in rest:
                fetched.cancel()
            wait(rest)  # whoever gets these buckets next must be alone with them
            raise failures[0]
        yield from missing

    def _chain_to(self, manifest: WeightManifest) -> tuple[DeltaSpec, ...]:
        """The deltas from what is held. Where none lead on from it, or they would save nothing, it is forgotten."""
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
        """What is held, as it is in `manifest`'s version, and what went wrong. An engine may look at the old ones."""
        if self._held is None:
            return {}, ""
        buckets = {index: _copy(bucket) if chain else bucket for index, bucket in self._held.buckets.items()}
        try:
            for delta in chain:
                patch(buckets, manifest.tensors, self._transport.pull_delta(manifest, delta, deadline))
            verify(manifest, buckets)
        except (SupersededError, UnreachableError):
            raise  # nothing is wrong with what is held
        except MemoryError as error:
            raise NoRoomError(f"no memory to patch what is held to version {manifest.version}") from error
        except WeightSyncError as error:
            deadline.check("pull")
            self._held = None
            return {}, f"deltas were of no use, all of it was fetched: {error}"
        return buckets, ""

    def _keep(self, manifest: WeightManifest, buckets: dict[int, torch.Tensor]) -> None:
        """After every bucket, as the next one may be superseded."""
        if self._keeps_base and buckets:
            self._held = _Base(manifest.version, _layout(manifest), dict(buckets))


def _copy(bucket: torch.Tensor) -> torch.Tensor:
    return allocate([bucket.numel()])[0].copy_(bucket)


def _layout(manifest: WeightManifest) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Where every tensor lies, and the buckets' sizes."""
    return manifest.tensors, manifest.buckets
