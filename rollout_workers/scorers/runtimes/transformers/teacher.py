"""A teacher: a causal language model that says how likely it finds each token of a response."""

from collections.abc import Sequence

import numpy as np
import torch

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.scorers.base import ScoringModel, UnfitModelError
from headway.rollout_workers.scorers.candidates import joined
from headway.rollout_workers.scorers.runtimes.files import longest_of, shared_tokens
from headway.rollout_workers.scorers.runtimes.sequences import sequence

from .loading import load, padded

_LOGITS_AT_A_TIME = 1 << 26
"""Logits that are held in float32 at one time: 256 MiB."""
_TOLERANCE = 1e-3


class TeacherModel:
    """Scores response tokens with `transformers.AutoModelForCausalLM`."""

    def __init__(self, asked: ScoringModel, config: ScorersConfig) -> None:
        """Raise UnfitModelError for a model whose output is not its head of its last hidden states."""
        from transformers import AutoModelForCausalLM

        self._model = load(AutoModelForCausalLM, asked, config)
        self._head = self._model.get_output_embeddings()
        self.vocabulary = self._model.get_input_embeddings().num_embeddings
        self.longest = longest_of(self._model.config)
        self._shared = shared_tokens(self.vocabulary, asked.policy)
        self._check_head(asked)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [R] float32 for each request: natural logarithms, at the request's temperature; with candidates as
        `rollout_workers.scorers.candidates` joins them."""
        sequences = [sequence(request) for request in requests]
        ids_BL, mask_BL = padded(sequences, 0, self._model.device)
        hidden_BLH = self._hidden(ids_BL, mask_BL)
        answers = []
        for row, request in enumerate(requests):
            start, end = len(request.prompt_tokens), len(sequences[row])
            if start == 0:  # nothing comes before the first token, which thus has no probability
                raise ValueError("a response without a prompt")
            answers.append(self._scores(hidden_BLH[row, start - 1 : end - 1], ids_BL[row, start:end], request))
        return answers

    def _scores(self, hidden_RH: torch.Tensor, tokens_R: torch.Tensor, request: ScoreRequest) -> Scores:
        """Return a request's answer, from a part of the logits at a time."""
        parts, size = list[Scores](), max(1, _LOGITS_AT_A_TIME // self.vocabulary)
        for first in range(0, len(tokens_R), size):
            logits_NV = self._head(hidden_RH[first : first + size]).float() / request.temperature
            logprobs_NV = logits_NV - logits_NV.logsumexp(1, keepdim=True)
            chosen_N = logprobs_NV.gather(1, tokens_R[first : first + size, None])[:, 0]
            best_NK = logprobs_NV[:, : self._shared].topk(min(request.top_k, self._shared), dim=1)
            found = chosen_N.clamp(max=0), best_NK.indices, best_NK.values.clamp(max=0)
            parts.append(joined(*(one.cpu().numpy() for one in found)))
        return np.concatenate(parts)

    def _hidden(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """[B, L, H]"""
        found: torch.Tensor = self._model.base_model(
            input_ids=ids_BL, attention_mask=mask_BL, use_cache=False
        ).last_hidden_state
        return found

    @torch.inference_mode()
    def _check_head(self, asked: ScoringModel) -> None:
        ids_BL = torch.arange(min(4, self.vocabulary), device=self._model.device)[None]
        logits = self._model(input_ids=ids_BL, use_cache=False).logits.float()
        ours = self._head(self._hidden(ids_BL, torch.ones_like(ids_BL))).float()
        if not torch.allclose(ours, logits, rtol=_TOLERANCE, atol=_TOLERANCE * float(logits.abs().max())):
            raise UnfitModelError(
                f"{asked.key}: {asked.path} changes its logits after its output head, as by a soft cap, which a teacher"
                " may not."
            )
