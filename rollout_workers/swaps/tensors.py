"""Compares what an engine holds of a version's tensors with what was published."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import TensorSpec, WeightManifest
from headway.rollout_workers.engines.base import WeightFingerprints
from headway.rollout_workers.engines.weight_loading.named_tensors import is_fused


def refuse_other_tensors(manifest: WeightManifest, held: WeightFingerprints | None) -> None:
    """Raise WeightSyncError for the first tensor that the engine holds otherwise than it was published."""
    if held is None or not manifest.fingerprints:
        return
    places_P, sizes_P, is_checked_P = _where(manifest.tensors, held.names)
    elements_P = np.append(held.elements_N, 0)[places_P]
    copies_P, rest_P = np.divmod(elements_P, sizes_P)
    # Both sides wrap at 2^64, as their type does.
    expected_P = copies_P.astype(np.uint64) * np.array(manifest.fingerprints, np.uint64)
    differs_P = np.append(held.fingerprints_N, np.uint64(0))[places_P] != expected_P
    if (wrong_P := is_checked_P & (differs_P | (rest_P != 0) | (copies_P == 0))).any():
        first = int(wrong_P.argmax())
        name = manifest.tensors[first].name
        raise WeightSyncError(
            f"after the swap to version {manifest.version} the engine holds another {name} than was published "
            f"({elements_P[first]} elements of {sizes_P[first]}): tensors of several versions, or misplaced"
        )


def tells_all(manifest: WeightManifest, held: WeightFingerprints | None) -> bool:
    """Return whether `refuse_other_tensors` compares every tensor: the engine says what it holds, under the names that
    were published."""
    return held is not None and bool(_where(manifest.tensors, held.names)[2].all())


@functools.lru_cache(maxsize=2)
def _where(
    published: tuple[TensorSpec, ...], names: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return three arrays [P] over the published tensors: the place in `names` (past the end if it has none), the
    number of elements, and whether the engine must hold it under this name: experts that an engine took apart have
    other names. All versions have the same."""
    place = {name: number for number, name in enumerate(names)}
    places = [place.get(spec.name, len(names)) for spec in published]
    is_checked = [spec.name in place or not is_fused(spec.name) for spec in published]
    return np.array(places, np.int64), np.array([math.prod(spec.shape) for spec in published]), np.array(is_checked)
