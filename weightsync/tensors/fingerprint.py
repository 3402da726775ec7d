"""Fingerprints of tensors: cheap on a CPU and a GPU, and additive over the parts of a sharded tensor.

    fingerprint = sum over elements i of bits_i * (2 i + 1)  mod 2^64

bits_i is the element's bit pattern as an unsigned number, i its place in the flat tensor. Two sums over each row of a
matrix suffice for all tensors of which it holds parts, so a GPU computes fingerprints as fast as it can read. They tell
apart tensors that differ in one element, versions, and misplaced rows; they are no defence against forgery.

R rows, C columns, N parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MODULUS = 1 << 64
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the width of an element in bytes. Those of 2 and 4 bytes are signed; their masks undo that."""
MASKS = {1: 0, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: 0}
"""Masks, by width, that cut off the sign bits which widening adds; 0: no mask is needed."""
_PIECE_BYTES = 256
_ROWS_AT_ONCE = 1 << 10
"""Intermediate numbers of so many rows stay in a core's cache, which is four times as fast."""
_WORDS = {
    1: (torch.uint8, torch.float32),
    2: (torch.uint16, torch.float64),
    4: (torch.uint32, torch.float64),
    8: (torch.uint32, torch.float64),
}
"""By the width of an element: the words that it is read as, and the number format that holds their sums exactly."""


@dataclass(frozen=True)
class MatrixParts:
    """Runs of rows of one matrix, each part of a flat tensor: int64 [N], on the matrix's device.

    Element (r, c) stands at offset + (r - start) * row_step + c * column_step of its tensor.
    """

    starts_N: torch.Tensor
    ends_N: torch.Tensor
    offsets_N: torch.Tensor
    row_steps_N: torch.Tensor
    column_steps_N: torch.Tensor

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> "MatrixParts":
        """Make parts from rows of (start, end, offset, row step, column step)."""
        return MatrixParts(*torch.tensor(rows, dtype=torch.int64).view(-1, 5).T.contiguous().to(device))


def fingerprint(tensor: torch.Tensor) -> int:
    """Return the fingerprint of a whole tensor of any number format."""
    return int(fingerprint_sum(tensor)) % MODULUS


def fingerprint_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the fingerprint of a whole tensor on its device, to be taken mod 2^64: int64 []. Does not wait for a
    GPU."""
    rows = tensor.detach().contiguous().view(1, -1) if tensor.dim() < 2 else tensor.detach().contiguous()
    rows_RC = rows.view(-1, rows.shape[-1]) if rows.numel() else rows.reshape(0, 1)
    return _sum_of_part(rows_RC, 0, rows_RC.shape[1], 1)


def fingerprint_part(rows_RC: torch.Tensor, offset: int, row_step: int, column_step: int) -> int:
    """Return what these elements add to a fingerprint. Element (r, c) stands at
    offset + r * row_step + c * column_step of the flat tensor."""
    return int(_sum_of_part(rows_RC, offset, row_step, column_step)) % MODULUS


def _sum_of_part(rows_RC: torch.Tensor, offset: int, row_step: int, column_step: int) -> torch.Tensor:
    parts = MatrixParts.of([(0, len(rows_RC), offset, row_step, column_step)], rows_RC.device)
    return fingerprint_parts([rows_RC], parts)[0]


def fingerprint_parts(matrices: Sequence[torch.Tensor], parts: MatrixParts) -> torch.Tensor:
    """Return what each part adds to its tensor's fingerprint: int64 [N], to be taken mod 2^64. Does not wait for a GPU.

    There is at least one matrix, each [rows, columns]. Rows are numbered through all of them; R is their sum.
    """
    sums_R, weighted_R = _row_sums([rows.detach().contiguous() for rows in matrices])
    places_R = torch.arange(len(sums_R), device=sums_R.device)
    total_N = _between(sums_R, parts)
    by_row_N = _between(sums_R * places_R, parts) - parts.starts_N * total_N
    by_column_N = _between(weighted_R, parts)
    by_place_N = parts.offsets_N * total_N + parts.row_steps_N * by_row_N + parts.column_steps_N * by_column_N
    return total_N + 2 * by_place_N


def _between(values_R: torch.Tensor, parts: MatrixParts) -> torch.Tensor:
    """Return the sums of each part's rows, mod 2^64: [N]."""
    until_R = torch.nn.functional.pad(values_R.cumsum(0), (1, 0))
    return until_R[parts.ends_N] - until_R[parts.starts_N]


def _row_sums(matrices: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's sum of bit patterns, and its sum of bit patterns times their columns: int64 [R] each."""
    bits = [rows.view(UNSIGNED[rows.element_size()]) for rows in matrices]
    if bits[0].is_cuda:
        from .fingerprint_kernel import row_sums

        return row_sums(bits, [MASKS[rows.element_size()] for rows in matrices])
    sums, weighted = zip(*map(_sums_by_words, bits), strict=True)
    return torch.cat(sums), torch.cat(weighted)


def _sums_by_words(bits_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the row sums as matrix products: a CPU is five times slower at adding up integers of 64 bits.

    The result is exact: each sum of a piece's words, weighted by their columns, stays below 2^24 in fp32 and below 2^53
    in fp64.
    """
    rows, columns = bits_RC.shape
    width = bits_RC.element_size()
    word, number = _WORDS[width]
    per_piece = _PIECE_BYTES // width
    pieces = -(-columns // per_piece)
    if columns % per_piece:
        bits_RC = torch.nn.functional.pad(bits_RC, (0, pieces * per_piece - columns))
    words_PB = bits_RC.contiguous().view(torch.uint8).view(-1, _PIECE_BYTES).view(word)
    per_element = width // word.itemsize
    weights_B2w = _weights(words_PB.shape[1], per_element).to(number)
    chunks = torch.split(words_PB, _ROWS_AT_ONCE)
    sums_P2w = torch.cat([chunk_PB.to(number) @ weights_B2w for chunk_PB in chunks]).long()
    shifts_w = torch.tensor([1 << 8 * word.itemsize * place for place in range(per_element)])
    sums_P, within_P = ((part_Pw * shifts_w).sum(1) for part_Pw in torch.split(sums_P2w, per_element, 1))
    sums_RP, within_RP = sums_P.view(rows, pieces), within_P.view(rows, pieces)
    before_P = per_piece * torch.arange(pieces)
    return sums_RP.sum(1), (within_RP + before_P * sums_RP).sum(1)


def _weights(words: int, per_element: int) -> torch.Tensor:
    """Return what each word adds to the sum of its place in an element, and to the weighted sum: [B, 2 * w]."""
    places, columns = torch.arange(words) % per_element, torch.arange(words) // per_element
    weights = torch.nn.functional.one_hot(places, per_element)
    return torch.cat([weights, weights * columns[:, None]], 1)
