"""The sequences of each step, the same for the backends, which pack them, and for the reference, which does not."""

import dataclasses

import numpy as np

from headway.learner.batching.packing import PackableSequence
from tests.learner.tiny import alike, sequences

from .models import Shape, vocabulary

SHARED = 9
"""The number of tokens with which the sequences of a step begin alike, in all steps but the first."""


def step_sequences(shape: Shape, step: int) -> list[PackableSequence]:
    """Return sequences from the whole vocabulary, which differ from step to step."""
    rng = np.random.default_rng(step)
    tokens = [rng.integers(0, vocabulary(shape), length).astype(np.int32) for length in shape.lengths]
    given = sequences(shape.lengths, seed=step)
    found = [dataclasses.replace(one, token_ids=ids) for one, ids in zip(given, tokens, strict=True)]
    return alike(found, SHARED) if step else found


def denominator(given: list[PackableSequence]) -> float:
    """Return the number of trained tokens of the whole step."""
    return float(sum(sequence.loss_mask.sum() for sequence in given))
