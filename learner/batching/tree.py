"""Tokens that sequences share at their beginnings are computed once: a row is then a tree of prefixes.

    sequences                    row: runs of tokens           path of each run
    1 2 3 | 4 5 6                1 2 3 4 5                     1 2 3 4 5
    1 2 3 | 4 5 7 8              5 7                           1 2 3 4 5 7      (the run is its end)
    1 2 3 | 9 6                  3 9                           1 2 3 9

A position of the row predicts one token, so it stands for a token together with its next one: sequences part one token
before they differ. So the first sequence's 5 predicts 6, and the second one's predicts 7. The last token of a sequence
predicts nothing and is left out. Positions also differ where experts to replay do, or a teacher's candidates.

Sorted, sequences that share most lie side by side: each adds to the row what the one before it does not have.

All else speaks of the tokens of sequences, laid end to end: `PrefixTree.predictor_T` brings a row's results back to
them, and adds up their gradients. N positions of the row, T packed tokens, R runs, P tokens of all paths together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

Labels = NDArray[np.int32]
"""[L - 1, F] for a sequence of L tokens, of all but the last: itself, its next token, and what else must agree."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The way in which a row of sequences is computed; N is less than T."""

    places_N: torch.Tensor
    """[N] int64, the packed token that each position stands for; the next packed token is the one that it predicts."""
    predictor_T: torch.Tensor
    """[T] int64, the position that predicts each packed token; 0 for the first token of a sequence."""
    cu_runs: torch.Tensor
    """[R + 1] int32, where each run begins; the last entry is N."""
    cu_paths: torch.Tensor
    """[R + 1] int32, where each run's path begins; the last entry is P."""
    paths_P: torch.Tensor
    """[P] int64, the positions of all paths: from a sequence's first token to the end of the run."""

    @property
    def num_positions(self) -> int:
        return len(self.places_N)

    def padded(self, count: int) -> "PrefixTree":
        """Returns a tree with a further run of `count` positions, which share nothing and predict nothing."""
        if not count:
            return self
        extra = torch.arange(self.num_positions, self.num_positions + count)
        return PrefixTree(
            places_N=F.pad(self.places_N, (0, count)),
            predictor_T=self.predictor_T,
            cu_runs=torch.cat([self.cu_runs, self.cu_runs[-1:] + count]),
            cu_paths=torch.cat([self.cu_paths, self.cu_paths[-1:] + count]),
            paths_P=torch.cat([self.paths_P, extra]),
        )


@dataclass(frozen=True)
class TreeSize:
    """The cost of sequences that are computed as one tree."""

    positions: int
    """N"""
    path_tokens: int
    """P, the tokens whose keys and values are held for attention."""
    pairs: float
    """Twice the pairs of a query and a key that it attends to: a sequence of L tokens alone has L^2."""
    path_pairs: float
    """The same where each path computes all of its queries."""


def size_of(sequences: Sequence[Labels]) -> TreeSize:
    """Returns the size of the tree of these sequences."""
    found = [(shared, len(sequences[index])) for index, shared in _sorted(sequences)]
    return TreeSize(
        positions=sum(length - shared for shared, length in found),
        path_tokens=sum(length for shared, length in found if shared < length),
        pairs=float(sum(length**2 - shared**2 for shared, length in found)),
        path_pairs=float(sum(length**2 for shared, length in found if shared < length)),
    )


def build_tree(sequences: Sequence[Labels]) -> PrefixTree | None:
    """Returns the tree of sequences laid end to end; None if they share nothing. Every rank gets the same."""
    starts = np.cumsum([0, *(len(labels) + 1 for labels in sequences)])
    places, paths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    cu_runs, cu_paths = [0], [0]
    predictor_T = np.zeros(starts[-1], np.int64)
    path = places[0]
    for index, shared in _sorted(sequences):
        start, length = int(starts[index]), len(sequences[index])
        end = cu_runs[-1] + length - shared
        path = np.concatenate([path[:shared], np.arange(cu_runs[-1], end)])
        predictor_T[start + 1 : start + 1 + length] = path
        if shared < length:
            places.append(np.arange(start + shared, start + length))
            paths.append(path)
            cu_runs.append(end)
            cu_paths.append(cu_paths[-1] + length)
    if cu_runs[-1] == sum(len(labels) for labels in sequences):
        return None
    return PrefixTree(
        places_N=torch.from_numpy(np.concatenate(places)),
        predictor_T=torch.from_numpy(predictor_T),
        cu_runs=torch.tensor(cu_runs, dtype=torch.int32),
        cu_paths=torch.tensor(cu_paths, dtype=torch.int32),
        paths_P=torch.from_numpy(np.concatenate(paths)),
    )


def labels_of(token_ids: NDArray[np.int32], *others: NDArray[np.generic] | None) -> Labels:
    """Returns the labels of a sequence of L tokens. `others`: [L - 1, ...] integers that must agree, too."""
    columns: list[NDArray[Any]] = [token_ids[:-1, None], token_ids[1:, None]]
    columns += [other.reshape(len(other), math.prod(other.shape[1:])) for other in others if other is not None]
    return np.ascontiguousarray(np.concatenate(columns, axis=1, dtype=np.int32, casting="same_kind"))


def _sorted(sequences: Sequence[Labels]) -> Iterator[tuple[int, int]]:
    """Yields the index of each sequence, sorted, with the number of positions that it shares with the one before."""
    before = np.zeros((0, sequences[0].shape[1] if sequences else 0), np.int32)
    for index in sorted(range(len(sequences)), key=lambda index: sequences[index].tobytes()):
        labels = sequences[index]
        yield index, _shared(before, labels)
        before = labels


def _shared(one: Labels, other: Labels) -> int:
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length
