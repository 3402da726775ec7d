"""A packed batch is prepared for a rank's device, so that the forward pass never waits for a number from the device.

T tokens of the batch, N positions of this rank (fewer where sequences share tokens), L layers with experts, K experts
chosen for a token, C candidates in its place, M positions that go through the output head.
"""

from dataclasses import dataclass

import torch

from headway.learner.models.attention import PackedLayout, check_alignment
from headway.learner.rows.batch import PackedBatch
from headway.learner.rows.padding import PaddedShape
from headway.learner.rows.positions import Positions

from .context import ContextGroup


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
