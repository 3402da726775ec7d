"""A teacher's likeliest tokens at each place of the responses, computed once and kept beside a stage's checkpoints.

    teacher-R.ids  teacher-R.logprobs    of replica R: [tokens, C], response after response
    teacher-R.index                      the sequences whose responses these are (`kept_values`); written last

Each replica of the learner writes those of the units that it computes: together eight bytes for each candidate of a
response token. They are mapped into memory, never read as a whole. A resumed stage maps them again, and loads no
teacher, unless a sequence's are missing: then all are computed anew.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from headway.learner.backends.base import Teacher, TopTokens
from headway.learner.batching.packing import Candidates, PackableSequence, concatenate, plan
from headway.learner.batching.units import Unit
from headway.learner.checkpoints.disk import sync
from headway.learner.ranks import Ranks

from .kept_values import ValuePlaces, keys_of, response_lengths

ROWS_AT_ONCE = 16
"""Micro-batches whose candidates are in memory at once."""

INDEX = "index"
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
        """Returns the file of one of PARTS, or the `index`."""
        return self.directory / f"teacher-{replica}.{part}"


def ask(teacher: Teacher, teaching: Teaching, ranks: Ranks, *, top_k: int, vocabulary: int) -> None:
    """Computes the teacher's `top_k` likeliest tokens at each place of each response, and keeps them in place of any
    that are there. Collective.

    Tokens from `vocabulary` on, which the student may lack, become places without a token.
    """
    if ranks.is_first:
        teaching.directory.mkdir(parents=True, exist_ok=True)
        for old in teaching.directory.glob("teacher-*"):
            old.unlink()
    ranks.any(False)  # no rank writes before the old files are gone
    rows = list(teaching.rows(ranks.replica))
    paths = [teaching.path(ranks.replica, part) for part, _ in PARTS] if teacher.is_lead else []
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
    if teacher.is_lead:
        _write_index(teaching.path(ranks.replica, INDEX), [sequence for row in rows for sequence in row])
    ranks.any(False)  # no rank reads before all files are there


def _write_index(path: Path, sequences: Sequence[PackableSequence]) -> None:
    with _partial(path).open("wb") as file:
        np.savez(file, keys=keys_of(sequences), lengths=response_lengths(sequences))
    _partial(path).replace(path)
    sync(path)
    sync(path.parent)


def taught(teaching: Teaching) -> list[Unit] | None:
    """Returns the units with the candidates that `ask` has kept for their sequences, as views of its files; None where
    some are missing, or cannot be read."""
    try:
        kept = [_Kept(index) for index in sorted(teaching.directory.glob(f"teacher-*.{INDEX}"))]
        return [[_with_candidates(sequence, kept) for sequence in unit] for unit in teaching.units]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


class _Kept:
    """The files of one replica of the learner that asked."""

    def __init__(self, index: Path) -> None:
        with index.open("rb") as file, np.load(file) as read:
            self._places = ValuePlaces(read["keys"], read["lengths"])
        self._ids, self._logprobs = (
            np.memmap(index.with_suffix(f".{part}"), dtype, "r").reshape(self._places.total, -1)
            if self._places.total
            else np.zeros((0, 1), dtype)
            for part, dtype in PARTS
        )

    def candidates(self, sequence: PackableSequence) -> Candidates | None:
        """Returns those of the response, if they are here."""
        place = self._places.of(sequence)
        return None if place is None else Candidates(self._ids[place], self._logprobs[place])


def _with_candidates(sequence: PackableSequence, kept: Sequence[_Kept]) -> PackableSequence:
    for one in kept:
        if (candidates := one.candidates(sequence)) is not None:
            return replace(sequence, candidates=candidates)
    raise KeyError("no file has this sequence")


def _candidates(
    found: TopTokens, row: Sequence[PackableSequence], vocabulary: int
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
