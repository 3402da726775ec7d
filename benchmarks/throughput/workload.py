"""The sequences that every case trains, with a long tail of lengths, the same for the same seed."""

from collections.abc import Sequence

import numpy as np

from headway.learner.batching.packing import PackableSequence

SHORTEST = 32
SPREAD = 1.0
"""The standard deviation of the logarithm of the lengths: a mean of 1.6 times the median."""
LONGEST_PROMPT = 256


def long_tailed_lengths(count: int, median: int, longest: int, seed: int = 0) -> list[int]:
    """Return lognormal lengths, cut off at both ends, in order of arrival."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), SPREAD, count)
    return [int(length) for length in drawn.clip(min(SHORTEST, longest), longest)]


def sequences(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[PackableSequence]:
    """Return random tokens with behavior logprobs near those of random weights, so that ratios are near 1."""
    rng = np.random.default_rng(seed)
    return [_sequence(rng, length, vocabulary) for length in lengths]


def _sequence(rng: np.random.Generator, length: int, vocabulary: int) -> PackableSequence:
    prompt_length = min(LONGEST_PROMPT, max(1, length // 4))
    response_length = length - prompt_length
    return PackableSequence(
        token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=np.ones(response_length, np.uint8),
        behavior_logprobs=np.full(response_length, -np.log(vocabulary), np.float32),
        lags=np.zeros(response_length, np.int64),
        advantages=np.full(response_length, rng.normal(), np.float32),
    )
