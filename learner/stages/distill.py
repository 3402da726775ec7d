"""Off-policy distillation: on given responses, the model learns what a teacher finds likely in the place of each token.

A unit is one conversation. The loss of a trained token is the divergence between the student and its teacher over the
teacher's likeliest tokens, mixed with the cross-entropy of the token itself. The teacher is a model of the same
vocabulary, on the learner's own backend; it is in memory only before the first step.
"""

import gc
import logging
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from headway.algorithms.distillation import sft, top_k_distillation
from headway.algorithms.metrics import Metrics, masked_mean, read
from headway.broker.errors import ConfigError
from headway.learner.backends.base import Backend, Teacher, TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import Row, Unit
from headway.learner.config import ModelConfig
from headway.learner.data.records import Conversation
from headway.learner.data.records.loading import open_conversations
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.stages.base import StageError, StageParts
from headway.learner.stages.record_stage import EMPTY, TaskStage, names_of, read_units
from headway.learner.stages.registry import DistillationOptions
from headway.learner.stages.response_values import CandidateFiles, compute_candidates, read_candidates

WHERE = "stages.distill.options"

log = logging.getLogger(__name__)


class DistillationTask:
    """Conversations, of which a teacher tells what it would have said in each place."""

    def __init__(
        self, parts: StageParts, options: DistillationOptions, units: Sequence[Unit], held_out: Sequence[Unit]
    ) -> None:
        self.units = units
        self.held_out = held_out
        self._parts = parts
        self._options = options

    def prepare(self, is_new: bool) -> None:
        """Compute the teacher's candidates of all conversations, or find them again. Collective. Raises StageError
        where this rank cannot read what others wrote."""
        parts, directory = self._parts, self._parts.checkpoints.running_directory
        candidate_files = CandidateFiles.of(
            [*self.units, *self.held_out],
            directory,
            replicas=parts.ranks.replicas,
            micro_batch_tokens=parts.micro_batch_tokens,
        )
        units = None if is_new else read_candidates(candidate_files)
        if parts.ranks.any(units is None):
            if not is_new and parts.ranks.is_first:
                log.warning("%s lacks the teacher's logprobs of some records; the teacher is asked again", directory)
            self._compute_candidates(candidate_files)
            gc.collect()  # the teacher's memory is free before the first step
            units = read_candidates(candidate_files)
        if units is None:
            raise StageError(f"The teacher's logprobs in {directory} cannot be read, though they were just written.")
        self.units, self.held_out = units[: len(self.units)], units[len(self.units) :]

    def _compute_candidates(self, candidate_files: CandidateFiles) -> None:
        parts, options = self._parts, self._options
        teacher = as_teacher(parts.open_model(ModelConfig(path=options.teacher)))
        vocabulary = 1 + max(parts.tokenizer.get_vocab().values())
        compute_candidates(teacher, candidate_files, parts.ranks, top_k=options.top_k, vocabulary=vocabulary)

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all trained tokens of all ranks."""
        units = self.held_out if held_out else self.units
        tokens = sum(int(sequence.loss_mask.sum()) for index in chosen for sequence in units[index])

        def loss(index: int, current_TC: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            losses_T, metrics = losses_of(self._options, rows[index].batch, current_TC)
            return losses_T.sum() / max(tokens, 1), read(metrics)

        return loss


class DistillationStage(TaskStage):
    """Distillation on records."""

    Options = DistillationOptions

    @classmethod
    def measured(cls, options: DistillationOptions, where: str) -> set[str]:
        """Return the names of the metrics of a step."""
        _, metrics = losses_of(options, EMPTY.batch, torch.zeros(0))
        return names_of(metrics)

    def __init__(self, parts: StageParts, options: DistillationOptions) -> None:
        """Raises ConfigError for a teacher of another vocabulary, a backend that cannot distil, and conversations that
        cannot be read or tokenized."""
        as_teacher(parts.backend)
        check_vocabulary(parts.tokenizer, load_tokenizer(ModelConfig(path=options.teacher)), f"{WHERE}.teacher")
        trained, held_out = read_units(parts, options, open_conversations, _one, WHERE)
        task = DistillationTask(parts, options, [unit for _, unit in trained], [unit for _, unit in held_out])
        super().__init__(parts, options, task, part="distill")


def losses_of(
    options: DistillationOptions, batch: PackedBatch, current_TC: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """[T] losses and their metrics; `current_TC` has the columns of `PackedBatch.candidates_TC`."""
    mask_T, teacher_TC = batch.loss_mask_T, batch.teacher_logprobs_TC
    if teacher_TC is None:  # an empty row
        current_TC, teacher_TC = torch.zeros(0, 3), torch.zeros(0, 1)
    own_T, largest_T, candidates_TC = current_TC[:, 0], current_TC[:, 1], current_TC[:, 2:]
    divergences_T, metrics = top_k_distillation(
        candidates_TC, teacher_TC.to(current_TC.device), mask_T, divergence=options.divergence, beta=options.beta
    )
    cross_entropy_T, weight = sft(own_T, mask_T), options.cross_entropy_weight
    agrees_T = (candidates_TC[:, 0] >= largest_T).to(mask_T.dtype)
    return (1 - weight) * divergences_T + weight * cross_entropy_T, {
        **metrics,
        **masked_mean("agreement", agrees_T, mask_T),
        **masked_mean("cross_entropy", cross_entropy_T, mask_T),
    }


def as_teacher(backend: Backend) -> Teacher:
    """Returns the backend if it can distil. Raises ConfigError."""
    if not isinstance(backend, Teacher):
        raise ConfigError(
            f"learner.backend: {type(backend).__name__} has no `likeliest`, by which a teacher tells its likeliest"
            " tokens (headway.learner.backends.base.Teacher). Add it, or take learner.backend=fsdp."
        )
    return backend


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, where: str) -> None:
    """Raises ConfigError unless both have the same tokens by the same numbers: a teacher's logprobs are of these."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[1]
    raise ConfigError(
        f"{where}: the teacher has another vocabulary than the student: {len(theirs)} tokens against {len(ours)}, and"
        f" token {token} is {_named(theirs, token)} to it and {_named(ours, token)} to the student. Distillation"
        " compares the logprobs of the same tokens: take a teacher of the same family, or train on its answers by a"
        " stage `sft`."
    )


def _named(vocabulary: Mapping[str, int], token: int) -> str:
    return next((repr(text) for text, number in vocabulary.items() if number == token), "none")


def _one(conversation: Conversation) -> tuple[Conversation]:
    return (conversation,)
