"""Training on preferences: of two responses to a prompt, one is the better one.

A unit is a pair, the chosen response before the rejected one. Losses that compare the model with a reference take the
model that the stage starts from.
"""

from collections.abc import Sequence

import torch

from algorithms.metrics import Metrics
from algorithms.supervised import dpo
from learner.backends.base import TokenLoss
from learner.objective.objective import numbers
from learner.rows.units import Row, Unit, row_values
from learner.stages.base import StageParts

from .options import PreferenceOptions
from .reference import Values, reference_logprobs


class PreferenceTask:
    """Pairs of responses."""

    def __init__(
        self, parts: StageParts, options: PreferenceOptions, units: Sequence[Unit], held_out: Sequence[Unit]
    ) -> None:
        self.units = units
        self.held_out = held_out
        self._parts = parts
        self._options = options
        self._references: list[Values] = []

    def prepare(self, is_new: bool) -> None:
        """Compute the reference's logprobs of all pairs, or read them again. Collective."""
        self._references = reference_logprobs(
            self._parts.backend,
            self._parts.ranks,
            [*self.units, *self.held_out],
            micro_batch_tokens=self._parts.micro_batch_tokens,
            path=self._parts.checkpoints.beside / "reference.npy",
            is_new=is_new,
        )

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all pairs of all ranks."""
        units, offset = (self.held_out, len(self.units)) if held_out else (self.units, 0)

        def loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            row = rows[index]
            places = [chosen[number] for number in row.units]
            reference_T = row_values(
                [units[place] for place in places], [self._references[offset + place] for place in places]
            )
            losses_P, metrics = self._of_pairs(row, current_T, reference_T.to(current_T.device))
            return losses_P.sum() / max(len(chosen), 1), numbers(metrics)

        return loss

    def _of_pairs(self, row: Row, current_T: torch.Tensor, reference_T: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        options = self._options
        return dpo(
            current_T,
            reference_T,
            row.batch.loss_mask_T,
            row.batch.cu_seqlens,
            beta=options.beta,
            kind=options.loss,
            label_smoothing=options.label_smoothing,
        )
