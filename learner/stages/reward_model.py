"""Training a reward model: of two responses to a prompt, the better one is to get the higher score.

A score is the head's output at the stop token that ends a response, so it judges the response as a whole. The same
token is at the end in three places, and scores mean the same in all of them:

training    a conversation ends with its last trained token, and a stage whose records end with another token than an
            end token of the model is refused. What a chat template writes after that token is left out
scoring     a sampled response ends with the stop token, which engines return as its last token. A response that was
            cut at its length limit has none; its score is that of a text without an end, which training never saw
the critic  V(s_t) is the head's output at the token before t. A critic that starts from a reward model gives a state
            the score of the text so far; the score of the whole response belongs to the state after its stop token

Backends give the values of the states in which tokens are chosen. So each sequence gets one token more, which nothing
reads: the value of the state in which it would be chosen is the score.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from headway.algorithms.metrics import read
from headway.algorithms.preferences import bradley_terry
from headway.broker.errors import ConfigError
from headway.learner.backends.base import ScoreBackend, TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import Row, Unit
from headway.learner.batching.packing import PackableSequence, labelled
from headway.learner.data.records import Preference
from headway.learner.data.records.loading import open_pairs
from headway.learner.models.end_tokens import end_tokens
from headway.learner.stages.base import StageParts
from headway.learner.stages.registry import RewardModelOptions

from .record_stage import TaskStage, Units, names_of, read_units

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHERE = "stages.reward_model.options"


class RewardTask:
    """Pairs of responses, the chosen one before the rejected one, each with its score at its last token."""

    def __init__(self, options: RewardModelOptions, trained: Units[Preference], held_out: Units[Preference]) -> None:
        """The last token of each sequence is the one that nothing reads."""
        self.units: Sequence[Unit] = [unit for _, unit in trained]
        self.held_out: Sequence[Unit] = [unit for _, unit in held_out]
        self._centering = options.centering
        self._margins = [pair.margin * options.margins for pair, _ in (*trained, *held_out)]

    def prepare(self, is_new: bool) -> None:
        """Do nothing: the loss needs no other model."""

    def loss(self, rows: Sequence[Row], chosen: Sequence[int], *, held_out: bool) -> TokenLoss:
        """Return the mean loss over all pairs of all ranks."""
        offset = held_out * len(self.units)

        def loss(index: int, values_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            row = rows[index]
            margin_P = torch.tensor([self._margins[offset + chosen[number]] for number in row.units])
            losses_P, metrics = bradley_terry(
                values_T[row.batch.cu_seqlens[1:].long() - 1],
                margin=margin_P.to(values_T.device),
                centering=self._centering,
            )
            return losses_P.sum() / max(len(chosen), 1), read(metrics)

        return loss


class RewardModelStage(TaskStage):
    """Training of a reward model; `parts.backend` is a `ScoreBackend`."""

    Options = RewardModelOptions

    @classmethod
    def measured(cls, options: RewardModelOptions, where: str) -> set[str]:
        """Return the names of the metrics of a step."""
        _, metrics = bradley_terry(torch.zeros(0))
        return names_of(metrics)

    def __init__(self, parts: StageParts, options: RewardModelOptions) -> None:
        """Raises ConfigError for pairs that cannot be read or tokenized, or whose responses do not end."""
        self._model = cast(ScoreBackend, parts.backend)
        trained, held_out = (
            [(pair, completed(unit, pair.place, parts.tokenizer)) for pair, unit in units]
            for units in read_units(parts, options, open_pairs, attrgetter("conversations"), WHERE)
        )
        super().__init__(parts, options, RewardTask(options, trained, held_out), part="reward model")

    def _outputs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return self._model.values(batches)

    def _step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        return self._model.step(batches, loss, learning_rate)


def completed(unit: Unit, place: str, tokenizer: "PreTrainedTokenizerBase") -> Unit:
    """Returns the sequences up to the stop token, each with the token behind it at which its score is read.

    Raises ConfigError, naming `place`, where another token ends a response.
    """
    sequences = []
    for sequence in unit:
        end = sequence.prompt_length + int(np.flatnonzero(sequence.loss_mask)[-1])
        last = int(sequence.token_ids[end])
        if last not in (ends := end_tokens(tokenizer).any):
            raise ConfigError(
                f"{place or WHERE}: a response ends with the token {tokenizer.decode([last])!r} instead of an end token"
                f" of the model ({', '.join(map(repr, tokenizer.convert_ids_to_tokens(list(ends))))}), at which a score"
                " is read. Leave out records that are cut, or let the chat template end answers with one of these."
            )
        sequences.append(with_state_behind(sequence.token_ids[: end + 1]))
    return sequences


def with_state_behind(token_ids: "np.typing.NDArray[np.int32]") -> PackableSequence:
    """Returns a sequence of one token more, whose value is that of the state behind `token_ids`."""
    return labelled(np.append(token_ids, token_ids[-1:]), np.append(np.zeros_like(token_ids, np.uint8), np.uint8(1)))
