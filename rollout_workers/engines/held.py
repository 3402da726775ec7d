"""What an engine holds of each tensor that it was given, as numbers: there may be tens of thousands of them.

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
    """All an engine's shards together, or one of them."""

    names: tuple[str, ...]
    fingerprints_N: Fingerprints
    """The sums of the parts', mod 2^64 (`weightsync.tensors.fingerprint`)."""
    elements_N: Elements
    """Multiples of the tensors', where shards have copies of the same; 0: nothing of it is held."""

    @staticmethod
    def of(tensors: Mapping[str, tuple[int, int]]) -> "Held":
        """From (fingerprint, elements) by name."""
        fingerprints = np.array([fingerprint for fingerprint, _ in tensors.values()], np.uint64)
        return Held(tuple(tensors), fingerprints, np.array([elements for _, elements in tensors.values()], np.int64))

    @staticmethod
    def together(shards: Iterable["Held"]) -> "Held":
        """Of shards that were given the same tensors; at least one."""
        first, *others = shards
        fingerprints_N, elements_N = first.fingerprints_N.copy(), first.elements_N.copy()
        for other in others:
            fingerprints_N += other.fingerprints_N
            elements_N += other.elements_N
        return Held(first.names, fingerprints_N, elements_N)
