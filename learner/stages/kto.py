"""Training on single judgements: each response is desirable or not (KTO).

A unit is one response. Its mismatch is the same prompt with the completion of the next record that is no answer to it,
from which each step estimates how far the policy is from its reference: the reference point of the loss. The reference
is the model that the stage starts from.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from headway.algorithms.metrics import read
from headway.algorithms.preferences import kto, reference_point_of, reference_point_sums
from headway.broker.errors import ConfigError
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.clusters import Row, Unit, row_values
from headway.learner.config import RecordsConfig
from headway.learner.data.records import Conversation, LabelledCompletion
from headway.learner.data.records.loading import open_labelled
from headway.learner.data.records.record_types import Content
from headway.learner.stages.base import StageParts
from headway.learner.stages.registry import KtoOptions

from .record_stage import TaskStage, Units, names_of, read_units
from .response_values import Values, reference_logprobs

WHERE = "stages.kto.options"

LabelledPair = tuple[LabelledCompletion, Conversation]
"""A response with its judgement, and its mismatch."""

RESPONSE, MISMATCH = slice(1), slice(1, 2)
"""The two sequences that are read of one record. The reference sees both in one row, with one prompt."""


class KtoTask:
    """Responses with judgements."""

    def __init__(
        self, parts: StageParts, options: KtoOptions, trained: Units[LabelledPair], held_out: Units[LabelledPair]
    ) -> None:
        self.units: Sequence[Unit] = [unit[:1] for _, unit in trained]
        self.held_out: Sequence[Unit] = [unit[:1] for _, unit in held_out]
        self._parts = parts
        self._options = options
        self._both = [unit for _, unit in (*trained, *held_out)]
        self._is_desirable = [record.label for (record, _), _ in (*trained, *held_out)]
        self._references: list[Values] = []

    def prepare(self, is_new: bool) -> None:
        """Compute the reference's logprobs of all responses and mismatches, or read them again. Collective."""
        self._references = reference_logprobs(
            self._parts, self._both, path=self._parts.checkpoints.running_directory / "references.npz", is_new=is_new
        )

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all responses of all ranks, against the reference point of their mismatches under
        the present weights."""
        places = [index + held_out * len(self.units) for index in chosen]
        point, options = self._reference_point(places), self._options

        def loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            row = rows[index]
            mine = [places[number] for number in row.units]
            losses_S, metrics = kto(
                current_T,
                self._reference(mine, RESPONSE).to(current_T.device),
                row.batch.loss_mask_T,
                row.batch.cu_seqlens,
                torch.tensor([self._is_desirable[place] for place in mine], dtype=torch.bool),
                point,
                beta=options.beta,
                desirable_weight=options.desirable_weight,
                undesirable_weight=options.undesirable_weight,
            )
            return losses_S.sum() / max(len(chosen), 1), read(metrics)

        return loss

    def _reference_point(self, places: Sequence[int]) -> float:
        sums = [0.0, 0.0]
        rows = self._parts.pack([self._both[place][MISMATCH] for place in places])
        for row, current_T in zip(rows, self._parts.backend.logprobs([row.batch for row in rows], 1.0), strict=True):
            mine = [places[number] for number in row.units]
            reference_T = self._reference(mine, MISMATCH).to(current_T.device)
            total, count = reference_point_sums(current_T, reference_T, row.batch.loss_mask_T, row.batch.cu_seqlens)
            sums = [sums[0] + float(total), sums[1] + float(count)]
        return reference_point_of(*self._parts.ranks.sum(sums))

    def _reference(self, places: Sequence[int], which: slice) -> torch.Tensor:
        """[T] the reference's logprobs in a row of these responses, or of their mismatches."""
        return row_values(
            [self._both[place][which] for place in places], [self._references[place][which] for place in places]
        )


class KtoStage(TaskStage):
    """Kahneman-Tversky optimization."""

    Options = KtoOptions

    @classmethod
    def measured(cls, options: KtoOptions, where: str) -> set[str]:
        """Return the names of the metrics of a step."""
        nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        _, metrics = kto(nothing, nothing, nothing, torch.zeros(1, dtype=torch.int32), none, 0.0)
        return names_of(metrics)

    def __init__(self, parts: StageParts, options: KtoOptions) -> None:
        """Raises ConfigError for responses that cannot be read or tokenized."""
        trained, held_out = read_units(parts, options, _labelled_pairs, _with_mismatch, WHERE, trained=RESPONSE)
        super().__init__(parts, options, KtoTask(parts, options, trained, held_out), part="kto")


def _labelled_pairs(source: RecordsConfig, seed: int, where: str) -> list[LabelledPair]:
    records = open_labelled(source, seed, where)
    return [
        (record, msgspec.structs.replace(record.conversation, completion=mismatch))
        for record, mismatch in zip(records, mismatches(records, where), strict=True)
    ]


def mismatches(records: Sequence[LabelledCompletion], where: str) -> list[Content]:
    """Returns, for each record, the completion of the next one that no record gives as an answer to the same prompt.

    Raises ConfigError where there is none: the reference point would be measured on real answers.
    """
    given = [(record.prompt, record.tools, record.chat_template_kwargs) for record in records]
    prompts = [msgspec.json.encode(each, order="deterministic") for each in given]
    completions = [msgspec.json.encode(record.completion, order="deterministic") for record in records]
    answers: dict[bytes, set[bytes]] = defaultdict(set)
    for prompt, completion in zip(prompts, completions, strict=True):
        answers[prompt].add(completion)
    different = list(dict.fromkeys(completions))
    numbers = {completion: number for number, completion in enumerate(different)}
    contents = {completion: record.completion for completion, record in zip(completions, records, strict=True)}
    found = []
    for record, prompt, after in zip(records, prompts, [*completions[1:], *completions[:1]], strict=True):
        if len(answers[prompt]) == len(different):
            raise ConfigError(
                f"{record.place or where}: every completion of {where} is an answer to this prompt, and KTO estimates"
                " by others how far the model is from its reference. Add records of other prompts."
            )
        first = numbers[after]
        others = (different[(first + number) % len(different)] for number in range(len(different)))
        found.append(contents[next(other for other in others if other not in answers[prompt])])
    return found


def _with_mismatch(pair: LabelledPair) -> tuple[Conversation, Conversation]:
    record, mismatch = pair
    return record.conversation, mismatch
