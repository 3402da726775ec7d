"""A teacher's likeliest tokens at each place of the responses, computed once and kept beside a stage's checkpoints.

Each replica of the learner writes those of the units that it computes, into two files of its own: token ids and
logprobs, together eight bytes for each candidate of a response token. They are mapped into memory, never read as a
whole. A resumed stage maps them again, and loads no teacher.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.backends.base import Likeliest, Teacher
from learner.checkpoints.disk import sync
from learner.ranks import Ranks
from learner.rows.packing import Candidates, PackableSequence, concatenate, plan
from learner.rows.units import Unit
from learner.stages.base import StageError

ROWS_AT_ONCE = 16
"""Micro-batches whose candidates are in memory at once."""

PARTS: tuple[tuple[str, type[np.generic]], ...] = (("ids", np.int32), ("logprobs", np.float32))


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """The units that a teacher sees, and where its candidates for them lie."""

    units: Sequence[Unit]
    shares: Sequence[Sequence[Sequence[int]]]
    """[replica][micro-batch] the units that it computes."""
    directory: Path

    @classmethod
    def of(cls, units: Sequence[Unit], directory: Path, *, replicas: int, micro_batch_tokens: int) -> "Teaching":
        """Returns the same on every rank."""
        lengths = [sum(len(sequence.token_ids) for sequence in unit) for unit in units]
        return cls(units=units, shares=plan(lengths, replicas, micro_batch_tokens), directory=directory)

    def rows(self, replica: int) -> Iterator[list[PackableSequence]]:
        """Yields the sequences of each micro-batch of a replica."""
        for row in self.shares[replica]:
            yield [sequence for index in row for sequence in self.units[index]]

    def path(self, replica: int, part: str) -> Path:
        """Returns the file of one of PARTS: [R, C], the responses of the replica's rows one after another."""
        return self.directory / f"teacher-{replica}.{part}"


def ask(teacher: Teacher, teaching: Teaching, ranks: Ranks, *, top_k: int, vocabulary: int) -> None:
    """Computes the teacher's `top_k` likeliest tokens at each place of each response, and keeps them. Collective.

    Tokens from `vocabulary` on, which the student may lack, become places without a token.
    """
    rows = list(teaching.rows(ranks.replica))
    paths = [teaching.path(ranks.replica, part) for part, _ in PARTS] if teacher.is_lead else []
    teaching.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [stack.enter_context(_partial(path).open("wb")) for path in paths]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            for row, found in zip(some, teacher.likeliest([concatenate(row) for row in some], top_k), strict=True):
                for file, values_RC in zip(files, _candidates(found, row, vocabulary), strict=False):
                    file.write(values_RC.tobytes())
    for path in paths:
        _partial(path).replace(path)
        sync(path)
    ranks.any(False)  # no rank reads before all files are there


def taught(teaching: Teaching) -> list[Unit]:
    """Returns the units with the candidates that `ask` has kept. Raises StageError where these are gone."""
    try:
        return _read(teaching)
    except (OSError, ValueError) as error:
        raise StageError(
            f"The teacher's logprobs of this stage cannot be read ({error}). Restore the files teacher-* in"
            f" {teaching.directory}, or remove it and train the stage from its beginning."
        ) from error


def _read(teaching: Teaching) -> list[Unit]:
    """Returns the units in their order, with views of the files."""
    found: dict[int, Unit] = {}
    for replica, share in enumerate(teaching.shares):
        places = [index for row in share for index in row]
        lengths = [_length(sequence) for index in places for sequence in teaching.units[index]]
        if not lengths:
            continue
        mapped = [np.memmap(teaching.path(replica, part), dtype, "r") for part, dtype in PARTS]
        ids, logprobs = (np.split(values.reshape(sum(lengths), -1), np.cumsum(lengths)[:-1]) for values in mapped)
        candidates = map(Candidates, ids, logprobs)
        for index in places:
            found[index] = [replace(sequence, candidates=next(candidates)) for sequence in teaching.units[index]]
    return [found[index] for index in range(len(teaching.units))]


def _candidates(
    found: Likeliest, row: Sequence[PackableSequence], vocabulary: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the candidates of the row's responses, [R, C] as PARTS has them."""
    if not row:
        return np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    is_response_T = _is_response(row)
    ids, logprobs = (values_TC.numpy()[is_response_T] for values_TC in found)
    is_known = ids < vocabulary
    return np.where(is_known, ids, 0).astype(np.int32), np.where(is_known, logprobs, np.float32(-np.inf))


def _is_response(row: Sequence[PackableSequence]) -> NDArray[np.bool_]:
    """[T] True at the tokens of responses."""
    parts = [np.arange(len(sequence.token_ids)) >= sequence.prompt_length for sequence in row]
    return np.concatenate(parts)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _length(sequence: PackableSequence) -> int:
    return len(sequence.token_ids) - sequence.prompt_length
