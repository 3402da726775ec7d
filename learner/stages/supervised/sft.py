"""Supervised fine-tuning on conversations: cross-entropy on the turns that are trained.

A unit is one conversation. The loss is the mean over all trained tokens of a step, so that a long answer counts for
more than a short one, however they were packed.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.algorithms.distillation import sft
from headway.algorithms.metrics import Metrics, masked_mean, read
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.units import Row, Unit
from headway.learner.data.records import Conversation
from headway.learner.data.records.loading import open_conversations
from headway.learner.stages.base import StageParts
from headway.learner.stages.registry import SftOptions

from .stage import TaskStage, names_of, read_units

WHERE = "stages.sft.options"


class SftTask:
    """Conversations."""

    def __init__(self, units: Sequence[Unit], held_out: Sequence[Unit]) -> None:
        self.units = units
        self.held_out = held_out

    def prepare(self, is_new: bool) -> None:
        """Do nothing: the loss needs no other model."""

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all trained tokens of all ranks."""
        units = self.held_out if held_out else self.units
        tokens = sum(int(sequence.loss_mask.sum()) for index in chosen for sequence in units[index])

        def loss(index: int, current_T3: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            losses_T, metrics = losses_of(current_T3, rows[index].batch.loss_mask_T)
            return losses_T.sum() / max(tokens, 1), read(metrics)

        return loss


def losses_of(current_T3: torch.Tensor, mask_T: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """[T] losses, and the means of cross-entropy, of `token_accuracy` (the share of tokens that the model finds the
    likeliest) and of its entropy in nats. `current_T3`: as for `PackedBatch.wants_confidence`."""
    logprobs_T, likeliest_T, entropy_T = current_T3.reshape(-1, 3).unbind(1)
    losses_T = sft(logprobs_T, mask_T)
    is_likeliest_T = (logprobs_T.detach() >= likeliest_T).to(mask_T.dtype)
    return losses_T, {
        **masked_mean("cross_entropy", losses_T, mask_T),
        **masked_mean("token_accuracy", is_likeliest_T, mask_T),
        **masked_mean("entropy", entropy_T, mask_T),
    }


class SftStage(TaskStage):
    """Supervised fine-tuning on records; `learner.stages.sft_phases` has generators and gates."""

    Options = SftOptions

    @classmethod
    def measured(cls, options: SftOptions, where: str) -> set[str]:
        """Return the names of the metrics of a step."""
        _, metrics = losses_of(torch.zeros(0), torch.zeros(0))
        return names_of(metrics)

    def __init__(self, parts: StageParts, options: SftOptions) -> None:
        """Raises ConfigError for conversations that cannot be read or tokenized."""
        trained, held_out = read_units(parts, options, open_conversations, _one, WHERE)
        task = SftTask([unit for _, unit in trained], [unit for _, unit in held_out])
        super().__init__(parts, options, task, part="sft")

    def _packed(self, units: Sequence[Unit]) -> list[Row]:
        rows = super()._packed(units)
        return [replace(row, batch=replace(row.batch, wants_confidence=True, only_trained=True)) for row in rows]


def _one(conversation: Conversation) -> tuple[Conversation]:
    return (conversation,)
