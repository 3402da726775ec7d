"""A stage before reinforcement learning: the model reads worked sums, the shortest first."""

from pathlib import Path
from typing import Any

import msgspec

from headway.learner.batching.packing import pack
from headway.learner.data.examples import Example
from headway.learner.objective.loss import supervised_loss
from headway.learner.stages.base import Progress, StageMetrics, StageParts
from headway.learner.stages.sft import tokenize

from .prompts import Sums


class ShortestFirst:
    """Trains the sums of the prompt source with their answers, ordered by length."""

    class Options(msgspec.Struct, frozen=True):
        """`options` of the stage in the recipe."""

        steps: int = 60
        batch_size: int = 32
        learning_rate: float = 1e-2
        largest: int = 9

    def __init__(self, parts: StageParts, options: Options) -> None:
        self._parts, self._options = parts, options
        sums = Sums(path="", seed=parts.seed, largest=options.largest)
        items = [sums.train(0, position) for position in range(sums.size)]
        examples = [Example(query=str(item.content), response=item.ground_truth) for item in items]
        self._examples = sorted(examples, key=lambda example: len(example.response))
        kept = parts.checkpoints.load()  # {} for a new stage; else what `keep` was given, with the model of that time
        self._steps: int = kept.get("steps", 0)
        self._loss: float | None = kept.get("loss")

    @property
    def metrics(self) -> StageMetrics:
        return StageMetrics(steps=self._steps, loss=self._loss)

    def run(self) -> bool:
        parts = self._parts
        while self._steps < self._options.steps:
            self._train()
            if parts.ranks.any(parts.should_stop()):
                parts.checkpoints.keep(self._steps, self._place())
                return False
            parts.checkpoints.keep_if_due(self._steps, self._place())
        return True

    def save(self) -> Path:
        return self._parts.checkpoints.leave(self._steps, self._place())

    def _place(self) -> dict[str, Any]:
        return {"steps": self._steps, "loss": self._loss}

    def _train(self) -> None:
        """Make one update of the model, and report it."""
        parts, options = self._parts, self._options
        batches = pack(
            [tokenize(example, parts.tokenizer, parts.renderer) for example in self._batch()],
            replica=parts.ranks.replica,
            replicas=parts.ranks.replicas,
            micro_batch_tokens=parts.micro_batch_tokens,
        )
        loss = supervised_loss(batches, parts.ranks.sum)
        self._loss, _, _ = parts.backend.step(batches, loss, temperature=1.0, learning_rate=options.learning_rate)
        self._steps += 1
        parts.report(Progress(part="worked sums", step=self._steps, max_steps=options.steps, loss=self._loss))

    def _batch(self) -> list[Example]:
        """The examples of the next step, from the beginning again after the last one."""
        first, count = self._steps * self._options.batch_size, len(self._examples)
        return [self._examples[index % count] for index in range(first, first + self._options.batch_size)]
