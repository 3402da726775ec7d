"""The probe: logprobs of a fixed token sequence under the weights to be published, for engines to check themselves."""

from collections.abc import Sequence

import numpy as np

from headway.broker.schema.weights import Probe
from headway.learner.backends.base import Backend
from headway.learner.batching.packing import PackableSequence, concatenate

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Rounding of one forward pass in the engine's number format, as the mean of a logprob's absolute difference. A real
model of 30 layers has 0.07 in bfloat16; a wrong layout is off by whole units."""


def measure_probe(
    backend: Backend, token_ids: Sequence[int], tolerance: float, base_logprobs: Sequence[float] = ()
) -> Probe:
    """Returns the logprobs of `token_ids`, of which there are at least two. `base_logprobs`: those without the adapter,
    where the version carries one alone. Collective."""
    return Probe(
        token_ids=list(token_ids),
        logprobs=measure_logprobs(backend, token_ids),
        tolerance=tolerance,
        base_logprobs=list(base_logprobs),
    )


def measure_logprobs(backend: Backend, token_ids: Sequence[int]) -> list[float]:
    """Returns one logprob for each of the tokens after the first, at temperature 1. Collective."""
    assert len(token_ids) >= 2, "a probe needs a token to predict"
    response = len(token_ids) - 1
    sequence = PackableSequence(
        token_ids=np.asarray(token_ids, np.int32),
        prompt_length=1,
        loss_mask=np.ones(response, np.uint8),
        behavior_logprobs=np.zeros(response, np.float32),
        lags=np.zeros(response, np.int64),
        advantages=np.zeros(response, np.float32),
    )
    (logprobs_T,) = backend.logprobs([concatenate([sequence])], temperature=1.0)
    logprobs: list[float] = logprobs_T[1:].tolist()
    return logprobs
