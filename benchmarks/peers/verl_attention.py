"""Attention for verl's packed rows, in the place of the package flash-attn's: torch's variable-length kernel."""

from typing import Any

import torch
from transformers import AttentionInterface

from .of_trl_async import PathKernel
from .of_verl import ATTENTION


class _Bounds:
    """Finds the bounds of samples in a row, once for all layers: it makes the processor wait for the GPU."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None

    def find(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[S + 1] and the length of the longest sample."""
        if self._of is not position_ids:
            begins = torch.nonzero(position_ids[0] == 0).flatten().to(torch.int32)
            self._cu_samples = torch.nn.functional.pad(begins, (0, 1), value=position_ids.shape[-1])
            self._longest = int(self._cu_samples.diff().max())
            self._of = position_ids
        return self._cu_samples, self._longest


_BOUNDS = _Bounds()


def attend(
    _module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    _mask: Any,
    scaling: float,
    position_ids: torch.Tensor,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, H, D]: each sample of a packed row attends to itself; a sample begins where the positions do."""
    cu_samples, longest = _BOUNDS.find(position_ids)
    query, key, value = (of[0].transpose(0, 1) for of in (query_BHTD, key_BKTD, value_BKTD))
    attended_THD = PathKernel().flash_attn_varlen_func(
        query,
        key,
        value,
        cu_samples,
        cu_samples,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1),
    )
    return attended_THD[None], None


AttentionInterface.register(ATTENTION, attend)
