"""Supervised fine-tuning: cross-entropy on the trained turns of conversations, or on {query, response} examples in
phases.

Of records a unit is one conversation. The loss is the mean over all trained tokens of a step, so that a long answer
counts for more than a short one, however they were packed.

A phase with a pass rate (its gate) ends once held-out prompts reach that rate. A stage that was stopped goes on at its
last checkpoint, after the examples that were trained before it.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from headway.algorithms.distillation import sft
from headway.algorithms.metrics import Metrics, masked_mean, read
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.clusters import Row, Unit
from headway.learner.batching.packing import PackableSequence, labelled, pack
from headway.learner.config import SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation
from headway.learner.data.records.conversation_renderer import ConversationRenderer
from headway.learner.data.records.loading import open_conversations
from headway.learner.objective.loss import supervised_loss

from .base import Progress, StageError, StageMetrics, StageParts
from .record_stage import TaskStage, names_of, read_units
from .registry import SftOptions

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
    """Supervised fine-tuning on records."""

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


log = logging.getLogger(__name__)

RISE_STEPS = 20
"""The number of steps over which the learning rate rises: fresh Adam moments make the first steps too large."""


class SftProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The stage's progress, which its checkpoints hold."""

    phase: int = 0
    step: int = 0
    """The number of trained steps of the phase."""
    steps: int = 0
    """The number of trained steps of all phases."""
    loss: float | None = None
    pass_rate: float | None = None
    """The pass rate as the phase measured it last."""


class SftPhasesStage:
    """The supervised training of one model, over all phases."""

    def __init__(self, parts: StageParts, phases: Sequence[SftPhaseConfig]) -> None:
        self._parts = parts
        self._phases = phases
        self._progress = msgspec.convert(parts.checkpoints.load(), SftProgress)
        self._conversations = ConversationRenderer(parts.tokenizer, parts.renderer)

    @property
    def metrics(self) -> StageMetrics:
        """The metrics over all phases."""
        return StageMetrics(steps=self._progress.steps, loss=self._progress.loss)

    def run(self) -> bool:
        """Trains all phases in order; False if stopped before the end. Raises StageError if a pass rate is not
        reached."""
        return all(self._run_phase(self._phases[number]) for number in range(self._progress.phase, len(self._phases)))

    def save(self) -> Path:
        """Writes the model as the last phase left it, and returns its directory."""
        return self._parts.checkpoints.leave(self._progress.steps, msgspec.to_builtins(self._progress))

    def _run_phase(self, phase: SftPhaseConfig) -> bool:
        """Trains from the present step to the end of the phase; False if stopped before."""
        examples = self._examples(phase)
        for step in range(self._progress.step + 1, phase.max_steps + 1):
            batch = list(islice(examples, phase.batch_size))
            if not batch:
                break
            self._train(batch, phase, step)
            if self._has_passed(phase):
                break
            if self._parts.ranks.any(self._parts.should_stop()):
                self._parts.checkpoints.keep(self._progress.steps, msgspec.to_builtins(self._progress))
                return False
            self._parts.checkpoints.keep_if_due(self._progress.steps, msgspec.to_builtins(self._progress))
        else:
            self._check_gate(phase)
        self._progress = msgspec.structs.replace(self._progress, phase=self._progress.phase + 1, step=0, pass_rate=None)
        return True

    def _examples(self, phase: SftPhaseConfig) -> Iterator[Example]:
        """Yields the examples that are not trained yet."""
        examples = open_examples(phase, seed=self._parts.seed + self._progress.phase)
        deque(islice(examples, self._progress.step * phase.batch_size), maxlen=0)
        return examples

    def _train(self, batch: Sequence[Example], phase: SftPhaseConfig, step: int) -> None:
        """Trains and reports one step."""
        loss = self._step(batch, phase.learning_rate * min(1.0, step / RISE_STEPS))
        pass_rate = self._progress.pass_rate
        if phase.until_pass_rate and step % phase.gate_every_steps == 0:
            pass_rate = self._parts.gate(self._parts.backend.named_tensors(), phase.gate_prompts)
        self._progress = SftProgress(
            phase=self._progress.phase, step=step, steps=self._progress.steps + 1, loss=loss, pass_rate=pass_rate
        )
        self._parts.report(
            Progress(
                part=f"warm-up {self._progress.phase + 1}/{len(self._phases)}",
                step=step,
                max_steps=phase.max_steps,
                loss=loss,
                pass_rate=pass_rate,
            )
        )

    def _has_passed(self, phase: SftPhaseConfig) -> bool:
        pass_rate = self._progress.pass_rate
        return pass_rate is not None and pass_rate >= phase.until_pass_rate

    def _check_gate(self, phase: SftPhaseConfig) -> None:
        """Raises StageError if the phase was to reach a pass rate."""
        if phase.until_pass_rate:
            raise StageError(
                f"sft.phases[{self._progress.phase}] ended after {phase.max_steps} steps at a pass rate of"
                f" {self._progress.pass_rate or 0:.2f}, below until_pass_rate={phase.until_pass_rate:g}:"
                " raise max_steps or learning_rate, or lower the gate."
            )

    def _step(self, examples: Sequence[Example], learning_rate: float) -> float:
        parts, split = self._parts, self._conversations.split
        before = split.total
        sequences = [_sequence(example, self._conversations) for example in examples]
        if split.total and not before and parts.ranks.is_first:
            log.warning("sft.phases: query and response are tokenized apart: %s", split)
        batches = pack(
            sequences,
            replica=parts.ranks.replica,
            replicas=parts.ranks.replicas,
            micro_batch_tokens=parts.micro_batch_tokens,
        )
        batches = [replace(batch, only_trained=True) for batch in batches]
        token_loss = supervised_loss(batches, parts.ranks.sum)
        loss, _, _ = parts.backend.step(batches, token_loss, temperature=1.0, learning_rate=learning_rate)
        return loss


def tokenize(example: Example, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> PackableSequence:
    """Returns query and response as one sequence that ends with the stop token; only the response is trained.

    The query has the same tokens as a prompt of that text, from which reinforcement learning will sample.
    """
    return _sequence(example, ConversationRenderer(tokenizer, renderer))


def _sequence(example: Example, conversations: ConversationRenderer) -> PackableSequence:
    conversation = Conversation(
        prompt=example.query, turns=example.turns, completion=example.response, place=f"query {example.query[:40]!r}"
    )
    rendered = conversations.render(conversation)
    assert rendered is not None  # the stop token is always trained
    return labelled(rendered.token_ids, rendered.loss_mask)
