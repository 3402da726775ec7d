"""The probe after a swap: whether an engine's logprobs of a fixed token sequence are the learner's."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe


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
