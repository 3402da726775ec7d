"""Values of responses beside a stage's checkpoints belong to sequences, which their file names by their tokens.

A resumed stage finds the values of each sequence by its key, in whatever order they lie: how records are packed, and
over how many ranks, may be another matter then.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.learner.batching.packing import PackableSequence
from headway.learner.batching.units import Unit

KEY_BYTES = 16


def keys_of(sequences: Iterable[PackableSequence]) -> NDArray[np.uint8]:
    """[sequences, 16] a digest of each one's tokens and of where its response begins."""
    digests = [_digest(sequence) for sequence in sequences]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)


def digest_of_units(units: Iterable[Unit]) -> str:
    """Returns a digest of all their sequences, in order, and of which tokens of them are trained."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for unit in units:
        for sequence in unit:
            digest.update(_digest(sequence) + sequence.loss_mask.tobytes())
        digest.update(b"/")
    return digest.hexdigest()


class ValuePlaces:
    """The places of the responses of sequences in a file, by key."""

    def __init__(self, keys: NDArray[np.uint8], lengths: NDArray[np.int64]) -> None:
        """`lengths`: the tokens of each response. Raises ValueError unless there is one for each key."""
        if keys.shape != (len(lengths), KEY_BYTES) or keys.dtype != np.uint8:
            raise ValueError(f"keys of the shape {keys.shape} for {len(lengths)} responses")
        ends = np.cumsum(lengths)
        self.total = int(lengths.sum())
        """The tokens of all responses."""
        self._spans = dict(
            zip(map(bytes, keys), zip((ends - lengths).tolist(), ends.tolist(), strict=True), strict=True)
        )

    def of(self, sequence: PackableSequence) -> slice | None:
        """Returns where the values of this response lie; None if the file has none."""
        span = self._spans.get(_digest(sequence))
        return None if span is None or span[1] - span[0] != response_length(sequence) else slice(*span)


def response_lengths(sequences: Sequence[PackableSequence]) -> NDArray[np.int64]:
    """[sequences] the tokens of each response."""
    return np.array([response_length(sequence) for sequence in sequences], np.int64)


def response_length(sequence: PackableSequence) -> int:
    """Returns the number of tokens of the response."""
    return len(sequence.token_ids) - sequence.prompt_length


def _digest(sequence: PackableSequence) -> bytes:
    digest = hashlib.blake2b(f"{sequence.prompt_length}:".encode(), digest_size=KEY_BYTES)
    digest.update(sequence.token_ids.astype("<i4").tobytes())
    return digest.digest()
