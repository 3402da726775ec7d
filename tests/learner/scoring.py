"""Scores of whole texts, by a backend and by transformers."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from headway.learner.backends.base import ValueBackend
from headway.learner.batching.packing import concatenate
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.stages.reward_model import with_state_behind

from .preferences import MODEL
from .tiny import sequences

STOP = load_tokenizer(MODEL).eos_token_id


def responses(*lengths: int) -> list[NDArray[np.int32]]:
    """Return tokens that end with the stop token, and among which there is no padding token."""
    texts = [sequence.token_ids % 17 for sequence in sequences(list(lengths))]
    return [np.append(tokens, np.int32(STOP)) for tokens in texts]


def scores(backend: ValueBackend, texts: list[NDArray[np.int32]]) -> torch.Tensor:
    """Return the scores [S] of whole texts, in one row."""
    row = concatenate([with_state_behind(tokens) for tokens in texts])
    return backend.values([row])[0][row.loss_mask_T > 0]


def by_transformers(directory: Path, texts: list[NDArray[np.int32]]) -> torch.Tensor:
    """Return the scores [S] of the texts as one batch, padded as the saved tokenizer pads."""
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    batch = tokenizer.pad({"input_ids": [tokens.tolist() for tokens in texts]}, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        logits_S1: torch.Tensor = model(**batch).logits
    return logits_S1[:, 0]
