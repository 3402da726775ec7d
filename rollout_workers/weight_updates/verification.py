"""Compares what an engine holds and computes with what was published: its tensors, and its logprobs of the probe."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
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


def covers_all_tensors(manifest: WeightManifest, held: WeightFingerprints | None) -> bool:
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


def refuse_other_logprobs(probe: Probe, scores: Sequence[float], version: WeightVersion, rounding: float = 0.0) -> None:
    """Raise WeightSyncError if the engine's logprobs of the probe differ from the learner's, on the mean of its tokens,
    by more than the probe's tolerance and the engine's own `rounding` allow.

    A single token says little: in bfloat16 an unlikely token of a real model is off by 0.6 where everything is right.
    """
    scored, expected = np.asarray(scores, np.float64), np.asarray(probe.logprobs, np.float64)
    if scored.shape != expected.shape:
        raise WeightSyncError(
            f"the probe of version {version} has {expected.size} logprobs, the engine gave {scored.size}"
        )
    difference = float(np.abs(scored - expected).mean()) if expected.size else 0.0  # a single token predicts none
    tolerance = max(probe.tolerance, rounding)
    # Negated, so that NaN fails too.
    if not difference <= tolerance:
        raise WeightSyncError(
            f"after the swap to version {version} the engine's logprobs differ from the learner's by a mean of "
            f"{difference:.3g} where rounding explains {tolerance:.3g}: it does not hold what "
            "was published. If it computes in a lower precision than the learner, workers.probe_swaps=false skips "
            "the check"
        )


def refuse_unused_adapter(
    probe: Probe, scores: Sequence[float], base_scores: Sequence[float], version: WeightVersion
) -> None:
    """Raise WeightSyncError if an adapter changes the learner's logprobs of the probe clearly, and the engine's by less
    than a quarter of that. `base_scores`: the engine's logprobs without the adapter. A probe that has none of the
    learner's without it is of whole weights, or of an older learner, and passes.

    The engine is compared with itself, so its rounding cancels out, as a quantized base does. What is clear: more than
    twice the difference of engine and learner without the adapter, which measures the rounding of both. That may be
    nothing where both compute by the same kernels, so it is at least a 25th of the probe's tolerance; and at most all
    of it, since a base that the engine quantizes differs by more than the learner rounds.
    """
    if not probe.base_logprobs:
        return
    base = np.asarray(base_scores, np.float64)
    if base.size != len(probe.base_logprobs):
        raise WeightSyncError(
            f"the probe of version {version} has {len(probe.base_logprobs)} logprobs without the adapter, the engine"
            f" gave {base.size}"
        )
    of_learner = _mean_size(np.subtract(probe.logprobs, probe.base_logprobs))
    of_engine = _mean_size(np.asarray(scores, np.float64) - base)
    of_rounding = _mean_size(base - probe.base_logprobs)
    clear = max(probe.tolerance / 25, min(2 * of_rounding, probe.tolerance))
    if of_learner > clear and not of_engine >= of_learner / 4:
        raise WeightSyncError(
            f"after the swap to version {version} the engine computes without its adapter: that changes the engine's"
            f" logprobs by a mean of {of_engine:.3g}, and the learner's by {of_learner:.3g}. The adapter is loaded and"
            " not used; set weights.adapter=merged, with which all versions are whole weights, or"
            " workers.probe_swaps=false, which skips the check"
        )


def _mean_size(differences: NDArray[np.float64]) -> float:
    return float(np.abs(differences).mean())
