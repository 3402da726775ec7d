"""Both sums of a fingerprint over the rows of matrices on a GPU, in one pass at the speed of its memory.

Imported only where there is a CUDA device, and so Triton.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]

_TILE = 4096
"""Elements that one program holds at a time."""
_WIDEST = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(bits, sums, weighted, rows, columns, MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sum_of_row = tl.zeros([ROWS], tl.int64)
    weighted_of_row = tl.zeros([ROWS], tl.int64)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_inside = (row[:, None] < rows) & (column[None, :] < columns)
        wide = tl.load(bits + row[:, None] * columns + column[None, :], mask=is_inside, other=0).to(tl.int64)
        if MASK:
            wide = wide & MASK
        sum_of_row += tl.sum(wide, 1)
        weighted_of_row += tl.sum(wide * column[None, :].to(tl.int64), 1)
    tl.store(sums + row, sum_of_row, mask=row < rows)
    tl.store(weighted + row, weighted_of_row, mask=row < rows)


def row_sums(matrices: Sequence[torch.Tensor], masks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's sum of integers, and its sum of integers times their columns, mod 2^64: int64 [R] each, R the
    rows of all matrices. The matrices are contiguous, and each is cut by its mask if that is not 0."""
    heights, device = [len(bits_RC) for bits_RC in matrices], matrices[0].device
    sums_R = torch.zeros(sum(heights), dtype=torch.int64, device=device)
    weighted_R = torch.zeros_like(sums_R)
    with torch.cuda.device(device):
        of_each = zip(matrices, masks, torch.split(sums_R, heights), torch.split(weighted_R, heights), strict=True)
        for bits_RC, mask, sums, weighted in of_each:
            rows, columns = bits_RC.shape
            if rows and columns:
                wide = min(_WIDEST, triton.next_power_of_2(columns))
                tall = _TILE // wide
                grid = (triton.cdiv(rows, tall),)
                _kernel[grid](bits_RC, sums, weighted, rows, columns, MASK=mask, ROWS=tall, COLUMNS=wide)
    return sums_R, weighted_R
