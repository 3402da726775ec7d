"""Training on preferences: of two responses to a prompt, one is the better one.

A unit is a pair, the chosen response before the rejected one. Losses that compare the model with a reference take the
model that the stage starts from.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch

from headway.algorithms.metrics import Metrics, read
from headway.algorithms.preferences import PREFERENCES, REFERENCE_FREE
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.clusters import Row, Unit, row_values
from headway.learner.data.records.loading import open_pairs
from headway.learner.objective.composition import open_part
from headway.learner.stages.base import StageParts
from headway.learner.stages.registry import DpoOptions

from .record_stage import TaskStage, names_of, read_units
from .response_values import Values, reference_logprobs

WHERE = "stages.dpo.options"


class DpoTask:
    """Pairs of responses."""

    def __init__(self, parts: StageParts, options: DpoOptions, units: Sequence[Unit], held_out: Sequence[Unit]) -> None:
        self.units = units
        self.held_out = held_out
        self._parts = parts
        self._loss = open_part(options.loss, PREFERENCES, f"{WHERE}.loss")
        self._needs_reference = options.loss.kind not in REFERENCE_FREE
        self._references: list[Values] = []

    def prepare(self, is_new: bool) -> None:
        """Compute the reference's logprobs of all pairs, or read them again, if the loss takes them. Collective."""
        if self._needs_reference:
            self._references = reference_logprobs(
                self._parts,
                [*self.units, *self.held_out],
                path=self._parts.checkpoints.running_directory / "reference.npz",
                is_new=is_new,
            )

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all pairs of all ranks."""
        units, offset = (self.held_out, len(self.units)) if held_out else (self.units, 0)

        def loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            row = rows[index]
            places = [chosen[number] for number in row.units]
            reference_T = None
            if self._needs_reference:
                kept = [self._references[offset + place] for place in places]
                reference_T = row_values([units[place] for place in places], kept).to(current_T.device)
            losses_P, metrics = self._of_pairs(row, current_T, reference_T)
            return losses_P.sum() / max(len(chosen), 1), read(metrics)

        return loss

    def _of_pairs(
        self, row: Row, current_T: torch.Tensor, reference_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, Metrics]:
        found: tuple[torch.Tensor, Metrics] = self._loss(
            current_T, reference_T, row.batch.loss_mask_T, row.batch.cu_seqlens
        )
        return found


class DpoStage(TaskStage):
    """Direct preference optimization and its kin."""

    Options = DpoOptions

    @classmethod
    def measured(cls, options: DpoOptions, where: str) -> set[str]:
        """Return the names of the metrics of a step. Raises ConfigError for a loss or an option that does not exist."""
        loss = open_part(options.loss, PREFERENCES, f"{where}.loss")
        nothing, no_pairs = torch.zeros(0), torch.zeros(1, dtype=torch.int32)
        _, metrics = loss(nothing, None if options.loss.kind in REFERENCE_FREE else nothing, nothing, no_pairs)
        return names_of(metrics)

    def __init__(self, parts: StageParts, options: DpoOptions) -> None:
        """Raises ConfigError for pairs that cannot be read or tokenized."""
        trained, held_out = read_units(parts, options, open_pairs, attrgetter("conversations"), WHERE)
        task = DpoTask(parts, options, [unit for _, unit in trained], [unit for _, unit in held_out])
        super().__init__(parts, options, task, part="dpo")
