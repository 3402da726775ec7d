"""Ranks that share the tokens of every packed row, and swap them for attention heads where sequences meet.

Each of C consecutive ranks runs the layers on its 1/C of a row. Around attention an all-to-all gives it all tokens of
1/C of the heads and takes the result back (Ulysses: Jacobs et al. 2023, arXiv:2309.14509). Key/value heads are
repeated where there are fewer than C.

Shapes: T tokens of the padded row, N = T / C of this rank, H heads of any kind, D their width.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from headway.learner.models.layout import check_context

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ContextGroup:
    """The C ranks that share a row, as one of them sees them. A single rank has all tokens and sends nothing."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def own(self, values_T: torch.Tensor) -> torch.Tensor:
        """[N] this rank's part of a row; T must be a multiple of C."""
        return values_T.chunk(self.size)[self.rank]

    def gathered(self, values_N: torch.Tensor) -> torch.Tensor:
        """[T] the parts of all ranks, on every rank. Collective.

        Each rank must compute the same result from it, so that the gradient of its own part is the whole gradient.
        """
        if self._group is None:
            return values_N
        values_T: torch.Tensor = _Gather.apply(values_N, self)  # type: ignore[no-untyped-call]
        return values_T

    def to_heads(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Turn each [N, H, D] into [T, max(1, H / C), D], all in one exchange. Collective."""
        parts = [_repeated(part, self.size) for part in rows]
        sent_CNF = torch.cat([part.reshape(len(part), self.size, -1) for part in parts], dim=2).transpose(0, 1)
        received_TF = self._exchange(sent_CNF).flatten(0, 1)
        shapes = [(part.shape[1] // self.size, part.shape[2]) for part in parts]
        received = torch.split(received_TF, [heads * width for heads, width in shapes], dim=1)
        return tuple(part.view(len(part), *shape) for part, shape in zip(received, shapes, strict=True))

    def to_tokens(self, rows_THD: torch.Tensor) -> torch.Tensor:
        """Turn [T, H / C, D] into [N, H, D]. Collective."""
        parts_CNHD = rows_THD.view(self.size, -1, *rows_THD.shape[1:])
        return self._exchange(parts_CNHD).transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts_C: torch.Tensor) -> torch.Tensor:
        """Send part i to rank i; return the received parts in the order of their senders."""
        assert self._group is not None
        return all_to_all_single_autograd(parts_C.contiguous(), None, None, self._group)

    def check_heads(self, config: "PretrainedConfig") -> None:
        """Raise ConfigError where heads cannot be shared evenly."""
        heads = config.num_attention_heads
        check_context(self.size, heads, getattr(config, "num_key_value_heads", None) or heads)


def _repeated(rows_NHD: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat heads until every rank has one: neighbours get copies of the head that their query heads share."""
    times = size // rows_NHD.shape[1]
    return rows_NHD.repeat_interleave(times, dim=1) if times > 1 else rows_NHD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_N: torch.Tensor, context: ContextGroup) -> torch.Tensor:
        ctx.context = context
        values_T = values_N.new_empty(context.size * len(values_N), *values_N.shape[1:])
        dist.all_gather_into_tensor(values_T, values_N.contiguous(), group=context._group)
        return values_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.context.own(gradients[0]), None
