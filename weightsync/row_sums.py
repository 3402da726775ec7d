"""Both sums of a fingerprint over the rows of a matrix on a GPU, in one pass at the speed of its memory.

Imported where there is a CUDA device, and so Triton.
"""

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


def row_sums(bits_RC: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] int64 twice, mod 2^64: of contiguous integers, cut by `mask` if it is not 0, and of each times its column."""
    rows, columns = bits_RC.shape
    sums_R = torch.zeros(rows, dtype=torch.int64, device=bits_RC.device)
    weighted_R = torch.zeros_like(sums_R)
    if rows and columns:
        wide = min(_WIDEST, triton.next_power_of_2(columns))
        tall = _TILE // wide
        grid = (triton.cdiv(rows, tall),)
        with torch.cuda.device(bits_RC.device):
            _kernel[grid](bits_RC, sums_R, weighted_R, rows, columns, MASK=mask, ROWS=tall, COLUMNS=wide)
    return sums_R, weighted_R
