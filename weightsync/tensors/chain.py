"""The bounded chain of deltas that ends at the newest version: how the learner extends it, and which deltas of it a
worker that follows by pull needs.

Each incarnation of the learner starts a chain of its own.
"""

import itertools
import logging
from typing import NamedTuple

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.weightsync.deadline import Deadline

from .buckets import digest_bytes
from .deltas import encode
from .staging import StagedWeights

logger = logging.getLogger(__name__)


class Delta(NamedTuple):
    """An encoded delta and its place in the manifest."""

    spec: DeltaSpec
    data: bytes


class DeltaChain:
    """At most `longest` deltas, which together are smaller than the weights themselves."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._newest: tuple[WeightVersion, StagedWeights] | None = None
        self._deltas: tuple[Delta, ...] = ()

    def extended(self, version: WeightVersion, staged: StagedWeights, deadline: Deadline) -> tuple[Delta, ...]:
        """Return the chain to `version`, empty where there is none. Changes nothing: see `advance`."""
        delta = self._encode(version, staged, deadline)
        return () if delta is None else _bounded((*self._deltas, delta), self._longest, staged.nbytes)

    def advance(self, version: WeightVersion, staged: StagedWeights | None, deltas: tuple[Delta, ...]) -> None:
        """Note that `version` was announced with `deltas`. The next delta starts from `staged`, if it is given."""
        self._newest = None if staged is None else (version, staged)
        self._deltas = deltas

    def _encode(self, version: WeightVersion, staged: StagedWeights, deadline: Deadline) -> Delta | None:
        if self._newest is None or not self._longest:
            return None
        base, base_staged = self._newest
        try:
            data = encode(base_staged, staged, deadline)
        except WeightSyncError as error:
            logger.warning(
                "Version %s is announced without deltas, those who follow by pull fetch all of it: %s", version, error
            )
            return None
        return None if data is None else Delta(DeltaSpec(base, version, len(data), digest_bytes(data)), data)


def chain_from(base: WeightVersion, manifest: WeightManifest) -> tuple[DeltaSpec, ...]:
    """Return the manifest's deltas from `base` to its version; empty where there is no such chain."""
    chain = tuple(itertools.dropwhile(lambda delta: delta.base != base, manifest.deltas))
    if not chain or chain[-1].version != manifest.version or any(delta.nbytes < 0 for delta in chain):
        return ()
    return () if any(a.version != b.base for a, b in itertools.pairwise(chain)) else chain


def _bounded(deltas: tuple[Delta, ...], longest: int, whole_bytes: int) -> tuple[Delta, ...]:
    """Return the newest of `deltas` within both bounds. A worker that would need more fetches the whole version."""
    kept = deltas[-longest:]
    while sum(delta.spec.nbytes for delta in kept) >= whole_bytes:
        kept = kept[1:]
    return kept
