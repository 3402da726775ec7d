"""Small reward models and teachers in directories, as a stage leaves them or a hub has them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.pretrained import load_tokenizer

ALPHABET = "0123456789+-*=,#^"
TOKENS = len(ALPHABET) + 2
_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}


def save_model(directory: Path, *, scores: bool, seed: int = 0, alphabet: str = ALPHABET) -> PreTrainedModel:
    """Save a random Qwen3 with weights and a tokenizer of one token a character.

    With `scores` it is a reward model whose padding token is the one that ends a response, as with the most awkward
    ones.
    """
    torch.manual_seed(seed)
    random = RandomModelConfig(architecture="qwen3", alphabet=alphabet, config=_SHAPE)
    tokenizer = load_tokenizer(ModelConfig(random=random))
    config = Qwen3Config(
        **_SHAPE,
        vocab_size=len(tokenizer),
        num_labels=1,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = (Qwen3ForSequenceClassification if scores else Qwen3ForCausalLM)(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def save_encoder(directory: Path) -> None:
    """Save a random RoBERTa classifier of one label, with the tokenizer that `save_model` writes."""
    config = RobertaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=66,
        num_labels=1,
    )
    RobertaForSequenceClassification(config).save_pretrained(directory)
    random = RandomModelConfig(architecture="qwen3", alphabet=ALPHABET, config=_SHAPE)
    load_tokenizer(ModelConfig(random=random)).save_pretrained(directory)


@torch.no_grad()
def score_of(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    """Return the head's output at the last token, whichever token that is."""
    hidden = model.base_model(torch.tensor([list(tokens)])).last_hidden_state
    return float(model.score(hidden)[0, -1, 0])
