"""transformers as a runtime of scorers: a model in this process.

    requests ─► padded: sequences of several lengths as one batch ─► RewardModel: a score of each
                                                                  └► TeacherModel: logprobs of each token

The invariant: padding reaches no score. An answer depends on its own request alone, whatever else is in the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.engines.base import usable_device

from . import Runner, ScoringModel, UnfitModelError, pack_candidates, tokens_of
from .model_checks import check_labels, longest_of, no_weights, reading, shared_tokens


def load(model_class: Any, asked: ScoringModel, config: ScorersConfig, **options: Any) -> Any:
    """Return the model on the scorers' device, in evaluation mode. No file of it can run code.

    Raises UnfitModelError, which names its key, where it cannot be loaded or lacks weights, and ConfigError for a
    device that torch cannot use.
    """
    device = usable_device(config.device, "scorers.device")
    with reading(asked.path, asked.key):
        model, found = model_class.from_pretrained(
            asked.path,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):
        raise no_weights(asked, missing)
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not torch.isfinite(torch.stack([*weight.aminmax()])).all():
            raise UnfitModelError(f"{asked.key}: {asked.path} has weights that are NaN or infinite in {name}.")
    torch.set_num_threads(config.threads)
    return model.to(device).eval().requires_grad_(requires_grad=False)


def padded(
    sequences: Sequence[NDArray[np.int32]], padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, L] int64 token ids, with `padding` behind the shorter sequences, and their [B, L] int64 mask."""
    longest = max(map(len, sequences))
    ids_BL = np.full((len(sequences), longest), padding, np.int64)
    mask_BL = np.zeros((len(sequences), longest), np.int64)
    for row, tokens in enumerate(sequences):
        ids_BL[row, : len(tokens)] = tokens
        mask_BL[row, : len(tokens)] = 1
    return torch.from_numpy(ids_BL).to(device), torch.from_numpy(mask_BL).to(device)


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
        sequences = [tokens_of(request) for request in requests]
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
        `pack_candidates` lays them out."""
        sequences = [tokens_of(request) for request in requests]
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
            parts.append(pack_candidates(*(one.cpu().numpy() for one in found)))
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


def open_transformers(asked: ScoringModel, config: ScorersConfig) -> Runner:
    """Load the model. Raises UnfitModelError."""
    return TeacherModel(asked, config) if asked.kind == "teacher" else RewardModel(asked, config)
