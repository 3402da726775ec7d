"""A reward model: a sequence classifier with one label, whose score is read at the last token of the response."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.scorers.base import ScoringModel
from headway.rollout_workers.scorers.runtimes.files import check_labels, longest_of
from headway.rollout_workers.scorers.runtimes.sequences import sequence

from .loading import load, padded


class RewardModel:
    """Scores whole responses with `transformers.AutoModelForSequenceClassification`."""

    def __init__(self, asked: ScoringModel, config: ScorersConfig) -> None:
        """Raise UnfitModelError for a model without a trained head of one output."""
        from transformers import AutoModelForSequenceClassification

        self._model = load(AutoModelForSequenceClassification, asked, config)
        check_labels(self._model.config, asked)
        self.vocabulary = self._model.get_input_embeddings().num_embeddings
        self.longest = longest_of(self._model.config)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [1] float32 for each request."""
        sequences = [sequence(request) for request in requests]
        padding = self._free_token(sequences)
        if padding is None and len(sequences) > 1:
            return [score for request in requests for score in self.score([request])]
        scores_B = self._scores(sequences, padding or 0)
        return [scores_B[row : row + 1].copy() for row in range(len(sequences))]

    @torch.inference_mode()
    def _scores(self, sequences: Sequence[NDArray[np.int32]], padding: int) -> Scores:
        """[B] float32"""
        text_config = self._model.config.get_text_config()
        # transformers reads the score at the last token that is not `pad_token_id`, which must be in no sequence.
        text_config.pad_token_id = padding if len(sequences) > 1 else None
        ids_BL, mask_BL = padded(sequences, padding, self._model.device)
        logits_B1 = self._model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
        scores_B: Scores = logits_B1[:, 0].float().cpu().numpy()
        return scores_B

    def _free_token(self, sequences: Sequence[NDArray[np.int32]]) -> int | None:
        """Return a token id that no sequence has; None where they have all of them."""
        used = np.zeros(self.vocabulary, bool)
        for tokens in sequences:
            used[tokens] = True
        free = np.flatnonzero(~used)
        return int(free[0]) if len(free) else None
