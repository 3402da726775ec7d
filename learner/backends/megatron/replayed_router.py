"""Routers that take recorded experts in the place of their own choice.

N tokens of this rank, E experts, K chosen for each.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from headway.learner.backends.replayed_choice import Recorded

from . import groups
from .row import MegatronRow


class RouterReplay:
    """Megatron's router asks this object for the experts of its tokens.

    Megatron's own class for it keeps one list in the whole process. With several micro-batches in the pipeline the
    list would need to know, between a forward pass and its recomputation, which micro-batch comes next.
    """

    recorded: Recorded | None = None

    def get_replay_topk(
        self,
        scores_NE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([N, K] scores, [N, K] experts) of the experts to take."""
        own: tuple[torch.Tensor, torch.Tensor] = choose(scores_NE, topk, num_groups=num_groups, group_topk=group_topk)
        if self.recorded is None:
            return own
        experts_NK = self.recorded.instead_of(own[1])
        return scores_NE.gather(1, experts_NK), experts_NK


class ReplayingLayer(TransformerLayer):
    """A decoder layer whose router replays what its row says, in the pass that recomputes it too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mlp.router.router_replay = self.replay = RouterReplay()

    def forward(self, *args: Any, packed_seq_params: MegatronRow, **options: Any) -> tuple[torch.Tensor, Any]:
        """Compute the layer as Megatron does, with the row's recorded experts."""
        recorded = packed_seq_params.recorded
        self.replay.recorded = None if recorded is None else self._own(recorded, packed_seq_params)
        output: tuple[torch.Tensor, Any] = super().forward(*args, packed_seq_params=packed_seq_params, **options)
        return output

    def _own(self, recorded: Recorded, row: MegatronRow) -> Recorded:
        """The recorded choices of this layer, for the tokens that this rank's router sees."""
        splits = [groups.context()] + ([groups.tensor()] if self.config.sequence_parallel else [])
        for group in splits:
            recorded = recorded.part(functools.partial(row.part, rank=group.rank(), size=group.size()))
        return recorded.of_layer(self.layer_number - 1)
