"""Logprobs of responses under the model that a stage starts from, computed once and kept beside its checkpoints.

A resumed stage reads them: its own weights have moved, and the model that it started from is not loaded again. They are
four bytes a token on the disk.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.checkpoints.disk import sync
from learner.rows.packing import PackableSequence
from learner.rows.units import Unit, response_values
from learner.stages.base import StageError, StageParts

UNITS_AT_ONCE = 1024
"""Units between two sums over the ranks."""

Values = list[NDArray[np.float32]]
"""[R] values of each response of a unit."""


def reference_logprobs(parts: StageParts, units: Sequence[Unit], *, path: Path, is_new: bool) -> list[Values]:
    """Returns the logprobs of all responses under `parts.backend`, by unit and sequence: computed now and kept at
    `path` for a new stage, else read from there. Collective. Raises StageError where they are gone."""
    if is_new:
        _compute(parts, units, path)
    try:
        kept = np.load(path)
    except (OSError, ValueError) as error:
        raise StageError(
            f"The reference logprobs of this stage cannot be read ({error}), and its model has moved since they were"
            f" computed. Restore {path}, or remove {path.parent} and train the stage from its beginning."
        ) from error
    return _divided(kept, units)


def _compute(parts: StageParts, units: Sequence[Unit], path: Path) -> None:
    found = [_of_units(parts, units[start : start + UNITS_AT_ONCE]) for start in range(0, len(units), UNITS_AT_ONCE)]
    if parts.ranks.is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".partial.npy")
        np.save(written, np.concatenate([*found, np.zeros(0, np.float32)]))
        sync(written)
        written.replace(path)
        sync(path.parent)
    parts.ranks.any(False)  # no rank reads before the file is there


def _of_units(parts: StageParts, units: Sequence[Unit]) -> NDArray[np.float32]:
    """Returns the logprobs of all their responses, one after another, on every rank."""
    rows = parts.pack(units)
    values = [[np.zeros(_length(sequence), np.float32) for sequence in unit] for unit in units]
    for row, logprobs_T in zip(rows, parts.backend.logprobs([row.batch for row in rows], 1.0), strict=True):
        first = 0
        for index in row.units:
            values[index] = response_values(logprobs_T, row.batch, units[index], first)
            first += len(units[index])
    mine = np.concatenate([each for of_unit in values for each in of_unit])
    return np.asarray(parts.ranks.sum(mine.tolist()), np.float32)


def _divided(flat: NDArray[np.float32], units: Sequence[Unit]) -> list[Values]:
    lengths = [_length(sequence) for unit in units for sequence in unit]
    responses = iter(np.split(flat, np.cumsum(lengths)[:-1]))
    return [[next(responses) for _ in unit] for unit in units]


def _length(sequence: PackableSequence) -> int:
    return len(sequence.token_ids) - sequence.prompt_length
