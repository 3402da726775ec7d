"""The part that an engine holds of each tensor that it was given, in arrays: there may be tens of thousands.

N tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Fingerprints = NDArray[np.uint64]
Elements = NDArray[np.int64]


@dataclass(frozen=True)
class Held:
    """The tensors that all shards of an engine hold together, or one shard, as fingerprints and sizes."""

    names: tuple[str, ...]
    fingerprints_N: Fingerprints
    """The sum of the fingerprints of each tensor's parts, mod 2^64 (`weightsync.tensors.fingerprint`)."""
    elements_N: Elements
    """Elements held of each tensor: a multiple of its size if shards have copies; 0 if none of it is held."""

    @staticmethod
    def of(tensors: Mapping[str, tuple[int, int]]) -> "Held":
        """Build one from (fingerprint, elements) by name."""
        fingerprints = np.array([fingerprint for fingerprint, _ in tensors.values()], np.uint64)
        return Held(tuple(tensors), fingerprints, np.array([elements for _, elements in tensors.values()], np.int64))

    @staticmethod
    def together(shards: Iterable["Held"]) -> "Held":
        """Add up shards that were given the same tensors. There must be at least one shard."""
        first, *others = shards
        fingerprints_N, elements_N = first.fingerprints_N.copy(), first.elements_N.copy()
        for other in others:
            fingerprints_N += other.fingerprints_N
            elements_N += other.elements_N
        return Held(first.names, fingerprints_N, elements_N)
