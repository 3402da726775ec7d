"""A packed batch is prepared for a rank's device, so that the forward pass never waits for a number from the device.

`ContextGroup` are the ranks that share the tokens of a row, and swap them for attention heads where sequences meet.

T tokens of the batch, N positions of this rank (fewer where sequences share tokens), L layers with experts, K experts
chosen for a token, C candidates in its place, M positions that go through the output head.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.padding import PaddedShape, Positions
from headway.learner.models.attention import PackedLayout, check_alignment
from headway.learner.models.parallel_layout import check_context

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


@dataclass(frozen=True, kw_only=True)
class FsdpRow:
    """A rank's part of a micro-batch. With several ranks a dummy sequence pads the row to a multiple of their number;
    a single rank may pad it to a `PaddedShape`."""

    token_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    next_ids_N: torch.Tensor
    """[N] the token that each position predicts; of no meaning for the last of a sequence."""
    has_previous_T: torch.Tensor
    """[T] bool, False where a sequence begins; without the dummy sequence."""
    layout: PackedLayout
    """The layout of the whole row: every rank's attention sees all of its positions."""
    experts_NLK: torch.Tensor | None
    """[N, L, K] experts to replay; see `PackedBatch`."""
    shares_N: torch.Tensor | None = None
    """[N] for the count of experts that are replayed; see `Positions.shares`."""
    next_candidates_NC: torch.Tensor | None = None
    """[N, C] the candidates for the place after each token; see `PackedBatch`."""
    predictor_T: torch.Tensor | None = None
    """[T] the position of the whole row that predicts each token; None: it is the token before."""
    picked_M: torch.Tensor | None = None
    """[M] the positions that go through the output head; None: all of them do."""

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        context: ContextGroup,
        device: torch.device,
        *,
        varlen: bool,
        shape: PaddedShape | None = None,
    ) -> "FsdpRow":
        """Return this rank's part of `batch` on its device, padded to `shape`. `varlen`: see `PackedLayout`."""
        positions = Positions.of(batch, context.size) if shape is None else shape.positions_of(batch)
        layout = positions.layout(batch, varlen=varlen) if shape is None else shape.layout(positions, batch)
        if varlen and batch.tree is not None:
            check_alignment(device)

        picked_M = batch.picked if shape is None else shape.picked_of(batch)

        def own(values_T: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_T is None else _moved(context.own(values_T), device)

        token_ids_N, next_ids_N = positions.here(batch.token_ids_T), positions.after(batch.token_ids_T)
        return cls(
            token_ids_N=_moved(context.own(token_ids_N), device),
            position_ids_N=_moved(context.own(positions.position_ids(batch)), device),
            next_ids_N=_moved(context.own(next_ids_N), device),
            has_previous_T=_moved(batch.position_ids_T > 0, device),
            layout=layout.moved(lambda tensor: _moved(tensor, device), context if context.size > 1 else None),
            experts_NLK=own(None if batch.experts_TLK is None else positions.here(batch.experts_TLK, -1)),
            shares_N=own(None if batch.experts_TLK is None else positions.shares(batch)),
            next_candidates_NC=own(None if batch.candidates_TC is None else positions.after(batch.candidates_TC)),
            predictor_T=None if positions.tree is None else _moved(positions.tree.predictor_T, device),
            picked_M=None if picked_M is None or context.size > 1 else _moved(picked_M, device),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that the model's pass reads of a row without experts and candidates, for the variable-length kernel."""
        found = [self.token_ids_N, self.position_ids_N, self.next_ids_N, self.layout.cu_seqlens]
        paths = self.layout.paths
        if paths is not None:
            found += [paths.cu_runs, paths.index, paths.copies.order, paths.copies.offsets]
        if self.picked_M is not None:
            found.append(self.picked_M)
        return found

    def at_next_token(self, next_T: torch.Tensor) -> torch.Tensor:
        """[T, ...] values of all tokens but the row's last, moved to the token that follows; 0 where a sequence
        begins."""
        if self.predictor_T is not None:
            moved_T = next_T[self.predictor_T]
        else:
            num_tokens = len(self.has_previous_T)
            moved_T = torch.cat([next_T.new_zeros(1, *next_T.shape[1:]), next_T[: num_tokens - 1]])
        return moved_T.where(self.has_previous_T.view(-1, *[1] * (next_T.dim() - 1)), 0.0)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device, from pinned memory, so that the copy does not wait for the device's work."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def placeholder() -> PackedBatch:
    """Return two tokens without loss; a rank computes them for an empty micro-batch, to join every collective."""
    zeros = torch.zeros(2)
    return PackedBatch(
        token_ids_T=zeros.long(),
        position_ids_T=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        loss_mask_T=zeros,
        behavior_logprobs_T=zeros,
        advantages_T=zeros,
        lags_T=zeros.long(),
    )
