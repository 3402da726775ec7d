"""A packed batch is prepared for a rank's device, so that the forward pass never waits for a number from the device.

T tokens of the batch, N of this rank, L layers with experts, K experts chosen for a token, C candidates in its place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from learner.models.attention import PackedLayout
from learner.rows.batch import PackedBatch

from .context import ContextGroup


@dataclass(frozen=True, kw_only=True)
class FsdpRow:
    """A rank's part of a micro-batch. With several ranks a dummy sequence pads the row to a multiple of their
    number."""

    token_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    next_ids_N: torch.Tensor
    """[N] the token after each; of no meaning for the last of a sequence."""
    has_previous_T: torch.Tensor
    """[T] bool, False where a sequence begins; without the dummy sequence."""
    layout: PackedLayout
    """The layout of the whole row: every rank's attention sees all of its tokens."""
    experts_NLK: torch.Tensor | None
    """[N, L, K] experts to replay; see `PackedBatch`."""
    next_candidates_NC: torch.Tensor | None = None
    """[N, C] the candidates for the place after each token; see `PackedBatch`."""

    @classmethod
    def of(cls, batch: PackedBatch, context: ContextGroup, device: torch.device, *, varlen: bool) -> "FsdpRow":
        """Return this rank's part of `batch` on its device. `varlen`: see `PackedLayout`."""
        padding = -batch.num_tokens % context.size
        token_ids_T = F.pad(batch.token_ids_T, (0, padding))
        dummy = torch.arange(padding, device=batch.position_ids_T.device)
        position_ids_T = torch.cat([batch.position_ids_T, dummy])
        ends = torch.full((min(padding, 1),), batch.num_tokens + padding, dtype=torch.int32)
        layout = PackedLayout.of(torch.cat([batch.cu_seqlens.cpu(), ends]), varlen=varlen)
        experts_TLK = batch.experts_TLK
        if experts_TLK is not None:
            experts_TLK = F.pad(experts_TLK, (0, 0, 0, 0, 0, padding), value=-1)
        candidates_TC = batch.candidates_TC
        if candidates_TC is not None:
            candidates_TC = _moved(context.own(F.pad(candidates_TC, (0, 0, 0, padding)).roll(-1, 0)), device)
        return cls(
            token_ids_N=_moved(context.own(token_ids_T), device),
            position_ids_N=_moved(context.own(position_ids_T), device),
            next_ids_N=_moved(context.own(token_ids_T.roll(-1)), device),
            has_previous_T=_moved(batch.position_ids_T > 0, device),
            layout=layout.moved(lambda tensor: _moved(tensor, device), context if context.size > 1 else None),
            experts_NLK=None if experts_TLK is None else _moved(context.own(experts_TLK), device),
            next_candidates_NC=candidates_TC,
        )

    def at_next_token(self, next_T: torch.Tensor) -> torch.Tensor:
        """[T, ...] values of all tokens but the row's last, moved to the token that follows; 0 where a sequence
        begins."""
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
