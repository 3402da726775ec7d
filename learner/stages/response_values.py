"""Values of responses that a stage computes once and keeps beside its checkpoints, in files that name the sequences.

Reference logprobs are those under the model that the stage starts from. A resumed stage reads them: its own weights
have moved, and the first model is not loaded again. They are four bytes a token on the disk.

A teacher's candidates are its likeliest tokens at each place of the responses:

    teacher-R.ids  teacher-R.logprobs    of replica R: [tokens, C], response after response
    teacher-R.index                      the sequences whose responses these are; written last

Each replica of the learner writes those of the units that it computes: together eight bytes for each candidate of a
response token. They are mapped into memory, never read as a whole. A resumed stage maps them again, and loads no
teacher, unless a sequence's are missing: then all are computed again.

A stage finds the values of each sequence by its key, in whatever order they lie: how records are packed, and over how
many ranks, may differ after a restart.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from headway.learner.backends.base import Teacher, TopTokens
from headway.learner.batching.clusters import Unit, response_values
from headway.learner.batching.packing import Candidates, PackableSequence, concatenate, plan
from headway.learner.disk import sync
from headway.learner.ranks import Ranks
from headway.learner.stages.base import StageError, StageParts

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


ROWS_AT_ONCE = 16
"""Micro-batches whose candidates are in memory at once."""

INDEX = "index"
PARTS: tuple[tuple[str, type[np.generic]], ...] = (("ids", np.int32), ("logprobs", np.float32))


@dataclass(frozen=True, kw_only=True)
class CandidateFiles:
    """The units that a teacher sees, and where its candidates for them lie."""

    units: Sequence[Unit]
    shares: Sequence[Sequence[Sequence[int]]]
    """[replica][micro-batch] the units that it computes."""
    directory: Path

    @classmethod
    def of(cls, units: Sequence[Unit], directory: Path, *, replicas: int, micro_batch_tokens: int) -> "CandidateFiles":
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


def compute_candidates(
    teacher: Teacher, candidate_files: CandidateFiles, ranks: Ranks, *, top_k: int, vocabulary: int
) -> None:
    """Computes the teacher's `top_k` likeliest tokens at each place of each response, and keeps them in place of any
    that are there. Collective.

    Tokens from `vocabulary` on, which the student may lack, become places without a token.
    """
    if ranks.is_first:
        candidate_files.directory.mkdir(parents=True, exist_ok=True)
        for old in candidate_files.directory.glob("teacher-*"):
            old.unlink()
    ranks.any(False)  # no rank writes before the old files are gone
    rows = list(candidate_files.rows(ranks.replica))
    paths = [candidate_files.path(ranks.replica, part) for part, _ in PARTS] if teacher.is_lead else []
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
        _write_index(candidate_files.path(ranks.replica, INDEX), [sequence for row in rows for sequence in row])
    ranks.any(False)  # no rank reads before all files are there


def _write_index(path: Path, sequences: Sequence[PackableSequence]) -> None:
    with _partial(path).open("wb") as file:
        np.savez(file, keys=keys_of(sequences), lengths=response_lengths(sequences))
    _partial(path).replace(path)
    sync(path)
    sync(path.parent)


def read_candidates(candidate_files: CandidateFiles) -> list[Unit] | None:
    """Returns the units with the candidates that `compute_candidates` has kept for their sequences, as views of its
    files; None where some are missing, or cannot be read."""
    try:
        kept = [_ReplicaFiles(index) for index in sorted(candidate_files.directory.glob(f"teacher-*.{INDEX}"))]
        return [[_with_candidates(sequence, kept) for sequence in unit] for unit in candidate_files.units]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


class _ReplicaFiles:
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


def _with_candidates(sequence: PackableSequence, kept: Sequence[_ReplicaFiles]) -> PackableSequence:
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
