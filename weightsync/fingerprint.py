"""A number that says which tensor this is, cheap wherever it lies, and additive over the parts of a sharded one.

    fingerprint = sum over elements i of bits_i * (2 i + 1)  mod 2^64

bits_i is the element's bit pattern as an unsigned number, i its place in the flat tensor. Two reductions compute it, so
a GPU is done as fast as it can read; ranks that hold a part each add theirs up. It tells versions and misplaced rows
apart; against forgery, on the wire, there are the buckets' digests.

R rows, C columns.
"""

import torch

MODULUS = 1 << 64
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element of so many bytes; the wider ones are signed, which `_sum` makes good."""


def fingerprint(tensor: torch.Tensor) -> int:
    """Of a whole tensor of any number format."""
    rows = tensor.detach().contiguous().view(1, -1) if tensor.dim() < 2 else tensor.detach().contiguous()
    rows_RC = rows.view(-1, rows.shape[-1]) if rows.numel() else rows.reshape(0, 1)
    return fingerprint_part(rows_RC, 0, rows_RC.shape[1], 1)


def fingerprint_part(rows_RC: torch.Tensor, offset: int, row_step: int, column_step: int) -> int:
    """What these elements add: element (r, c) stands at offset + r * row_step + c * column_step of the flat tensor."""
    sums_R = _sum(rows_RC, 1)
    sums_C = _sum(rows_RC, 0)
    total = int(sums_R.sum())
    by_row = int((sums_R * torch.arange(len(sums_R), device=sums_R.device)).sum())
    by_column = int((sums_C * torch.arange(len(sums_C), device=sums_C.device)).sum())
    return ((2 * offset + 1) * total + 2 * (row_step * by_row + column_step * by_column)) % MODULUS


def _sum(rows_RC: torch.Tensor, dimension: int) -> torch.Tensor:
    """Of bit patterns, int64 mod 2^64: a negative number is its pattern less a power of two, once for each."""
    width = rows_RC.element_size()
    bits = rows_RC.view(UNSIGNED[width])
    sums = bits.sum(dimension, dtype=torch.int64)
    if width in (2, 4):
        sums += (bits < 0).sum(dimension, dtype=torch.int64) << (8 * width)
    return sums
