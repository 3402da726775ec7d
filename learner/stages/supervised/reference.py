"""Logprobs of responses under the model that a stage starts from, computed once and kept beside its checkpoints.

A resumed stage reads them: its own weights have moved, and the model that it started from is not loaded again. They are
four bytes a token on the disk, and belong to sequences that the file names (`kept_values`).
"""

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from headway.learner.batching.units import Unit, response_values
from headway.learner.checkpoints.disk import sync
from headway.learner.stages.base import StageError, StageParts

from .kept_values import ValuePlaces, keys_of, response_length, response_lengths

UNITS_AT_ONCE = 1024
"""Units between two sums over the ranks."""

Values = list[NDArray[np.float32]]
"""[R] values of each response of a unit."""


def reference_logprobs(parts: StageParts, units: Sequence[Unit], *, path: Path, is_new: bool) -> list[Values]:
    """Returns the logprobs of all responses under `parts.backend`, by unit and sequence: computed now and kept at
    `path` for a new stage, else read from there. Collective. Raises StageError where they are gone, or are those of
    other sequences."""
    if is_new:
        _compute(parts, units, path)
    try:
        return _read(path, units)
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise StageError(
            f"The reference logprobs of this stage cannot be read ({error}), and its model has moved since they were"
            f" computed. Restore {path}, or remove {path.parent} and train the stage from its beginning."
        ) from error


def _compute(parts: StageParts, units: Sequence[Unit], path: Path) -> None:
    found = [_of_units(parts, units[start : start + UNITS_AT_ONCE]) for start in range(0, len(units), UNITS_AT_ONCE)]
    if parts.ranks.is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".partial.npz")
        sequences = [sequence for unit in units for sequence in unit]
        np.savez(
            written,
            keys=keys_of(sequences),
            lengths=response_lengths(sequences),
            values=np.concatenate([*found, np.zeros(0, np.float32)]),
        )
        sync(written)
        written.replace(path)
        sync(path.parent)
    parts.ranks.any(False)  # no rank reads before the file is there


def _of_units(parts: StageParts, units: Sequence[Unit]) -> NDArray[np.float32]:
    """Returns the logprobs of all their responses, one after another, on every rank."""
    rows = parts.pack(units)
    values = [[np.zeros(response_length(sequence), np.float32) for sequence in unit] for unit in units]
    for row, logprobs_T in zip(rows, parts.backend.logprobs([row.batch for row in rows], 1.0), strict=True):
        first = 0
        for index in row.units:
            values[index] = response_values(logprobs_T, row.batch, units[index], first)
            first += len(units[index])
    mine = np.concatenate([each for of_unit in values for each in of_unit])
    return np.asarray(parts.ranks.sum(mine.tolist()), np.float32)


def _read(path: Path, units: Sequence[Unit]) -> list[Values]:
    with path.open("rb") as file, np.load(file) as kept:
        places, values = ValuePlaces(kept["keys"], kept["lengths"]), kept["values"]
    if len(values) != places.total:
        raise ValueError(f"it has {len(values)} values, and {places.total} tokens")
    found = [[places.of(sequence) for sequence in unit] for unit in units]
    if missing := sum(place is None for unit in found for place in unit):
        raise ValueError(
            f"it lacks {missing} of the {sum(map(len, found))} responses, which have other tokens than when the stage"
            " began"
        )
    return [[values[place] for place in unit] for unit in found]
