"""The supervised warm-up: packed cross-entropy on {query, response} examples, phase by phase.

A phase with a gate ends once held-out prompts pass at its rate. Generating and scoring are the workers' room, so the
gate is passed in.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from broker.errors import HeadwayError
from learner.backends.base import Backend
from learner.config import SftConfig, SftPhaseConfig
from learner.data.examples import Example, open_examples
from learner.data.prompts.rendering import Renderer
from learner.models.model import encode
from learner.objective.objective import supervised_loss
from learner.ranks import Ranks
from learner.rows.packing import PackableSequence, pack

Gate = Callable[[Iterable[tuple[str, torch.Tensor]], int], float]
"""(named tensors, number of prompts) -> pass rate, the same on every rank. Collective: all iterate the tensors."""

RISE_STEPS = 20
"""The learning rate rises over so many steps: fresh Adam moments make the first ones too large."""


class WarmUpError(HeadwayError):
    """The warm-up ended without what it was for."""


@dataclass(frozen=True, kw_only=True)
class SftProgress:
    """What a progress bar shows."""

    phase: int
    phases: int
    step: int
    max_steps: int
    loss: float
    pass_rate: float | None


class SftStage:
    """The warm-up of one model, over all phases."""

    def __init__(
        self,
        *,
        backend: Backend,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer,
        config: SftConfig,
        gate: Gate,
        seed: int,
        micro_batch_tokens: int,
        report: Callable[[SftProgress], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._config = config
        self._gate = gate
        self._seed = seed
        self._micro_batch_tokens = micro_batch_tokens
        self._report = report
        self._should_stop = should_stop

    def run(self) -> bool:
        """All phases in order; False when asked to stop before the end."""
        return all(self._run_phase(number, phase) for number, phase in enumerate(self._config.phases))

    def _run_phase(self, number: int, phase: SftPhaseConfig) -> bool:
        examples = open_examples(phase, seed=self._seed + number)
        pass_rate = None
        for step in range(1, phase.max_steps + 1):
            batch = list(islice(examples, phase.batch_size))
            if not batch:
                return True
            loss = self._step(batch, phase.learning_rate * min(1.0, step / RISE_STEPS))
            if phase.until_pass_rate and step % phase.gate_every_steps == 0:
                pass_rate = self._gate(self._backend.named_tensors(), phase.gate_prompts)
            self._report(
                SftProgress(
                    phase=number + 1,
                    phases=len(self._config.phases),
                    step=step,
                    max_steps=phase.max_steps,
                    loss=loss,
                    pass_rate=pass_rate,
                )
            )
            if self._ranks.any(self._should_stop()):
                return False
            if pass_rate is not None and pass_rate >= phase.until_pass_rate:
                return True
        if phase.until_pass_rate:
            raise WarmUpError(
                f"sft.phases[{number}] ended after {phase.max_steps} steps at a pass rate of {pass_rate or 0:.2f}, "
                f"below until_pass_rate={phase.until_pass_rate:g}: raise max_steps or learning_rate, or lower the gate."
            )
        return True

    def _step(self, examples: Sequence[Example], learning_rate: float) -> float:
        batches = pack(
            [tokenize(example, self._tokenizer, self._renderer) for example in examples],
            replica=self._ranks.replica,
            replicas=self._ranks.replicas,
            micro_batch_tokens=self._micro_batch_tokens,
        )
        token_loss = supervised_loss(batches, self._ranks.sum)
        loss, _, _ = self._backend.step(batches, token_loss, temperature=1.0, learning_rate=learning_rate)
        return loss


def tokenize(example: Example, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> PackableSequence:
    """Query and response as one sequence that ends with the stop token; only the response is trained.

    The query has the tokens that a prompt of that text has, so that what is learned here is what training samples from.
    """
    _, query = renderer.render(example.query, "an SFT query")
    response = [
        *encode(tokenizer, example.response, "an SFT response", add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    zeros = np.zeros(len(response), np.float32)
    return PackableSequence(
        token_ids=np.asarray(query + response, np.int32),
        prompt_length=len(query),
        loss_mask=np.ones(len(response), np.uint8),
        behavior_logprobs=zeros,
        lags=np.zeros(len(response), np.int64),
        advantages=zeros,
    )
