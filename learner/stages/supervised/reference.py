"""Logprobs of responses under the model that a stage starts from, computed once and kept beside its checkpoints.

A resumed stage reads them: its own weights have moved, and the model that it started from is not loaded again. They are
four bytes a token on the disk.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.backends.base import Backend
from learner.checkpoints.disk import sync
from learner.ranks import Ranks
from learner.rows.clusters import PrefixSharing
from learner.rows.packing import PackableSequence
from learner.rows.units import Row, Unit, pack_units, response_values
from learner.stages.base import StageError

UNITS_AT_ONCE = 1024
"""Units between two sums over the ranks."""

Pack = Callable[[Sequence[Unit]], list[Row]]
"""Returns this replica's rows of the units."""

Values = list[NDArray[np.float32]]
"""[R] values of each response of a unit."""


def reference_logprobs(
    backend: Backend,
    ranks: Ranks,
    units: Sequence[Unit],
    *,
    micro_batch_tokens: int,
    prefix_sharing: PrefixSharing = "never",
    path: Path,
    is_new: bool,
) -> list[Values]:
    """Returns the logprobs of all responses, by unit and sequence: computed now and kept at `path` for a new stage,
    else read from there. Collective. Raises StageError where they are gone."""
    if is_new:
        pack = functools.partial(
            pack_units,
            replica=ranks.replica,
            replicas=ranks.replicas,
            micro_batch_tokens=micro_batch_tokens,
            prefix_sharing=prefix_sharing,
        )
        _compute(backend, ranks, units, pack, path)
    try:
        kept = np.load(path)
    except (OSError, ValueError) as error:
        raise StageError(
            f"The reference logprobs of this stage cannot be read ({error}), and its model has moved since they were"
            f" computed. Restore {path}, or remove {path.parent} and train the stage from its beginning."
        ) from error
    return _divided(kept, units)


def _compute(backend: Backend, ranks: Ranks, units: Sequence[Unit], pack: Pack, path: Path) -> None:
    parts = [
        _of_units(backend, ranks, units[start : start + UNITS_AT_ONCE], pack)
        for start in range(0, len(units), UNITS_AT_ONCE)
    ]
    if ranks.is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".partial.npy")
        np.save(written, np.concatenate([*parts, np.zeros(0, np.float32)]))
        sync(written)
        written.replace(path)
        sync(path.parent)
    ranks.any(False)  # no rank reads before the file is there


def _of_units(backend: Backend, ranks: Ranks, units: Sequence[Unit], pack: Pack) -> NDArray[np.float32]:
    """Returns the logprobs of all their responses, one after another, on every rank."""
    rows = pack(units)
    values = [[np.zeros(_length(sequence), np.float32) for sequence in unit] for unit in units]
    for row, logprobs_T in zip(rows, backend.logprobs([row.batch for row in rows], 1.0), strict=True):
        first = 0
        for index in row.units:
            values[index] = response_values(logprobs_T, row.batch, units[index], first)
            first += len(units[index])
    mine = np.concatenate([each for of_unit in values for each in of_unit])
    return np.asarray(ranks.sum(mine.tolist()), np.float32)


def _divided(flat: NDArray[np.float32], units: Sequence[Unit]) -> list[Values]:
    lengths = [_length(sequence) for unit in units for sequence in unit]
    responses = iter(np.split(flat, np.cumsum(lengths)[:-1]))
    return [[next(responses) for _ in unit] for unit in units]


def _length(sequence: PackableSequence) -> int:
    return len(sequence.token_ids) - sequence.prompt_length
