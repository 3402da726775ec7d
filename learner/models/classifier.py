"""A reward model's files, as `transformers.AutoModelForSequenceClassification` loads them.

A score is the head's output at the last token of a completed response: its stop token. transformers takes the last
token that is not the padding token instead, which is the same as long as no response ends with the padding token.
"""

from typing import TYPE_CHECKING

import torch

from broker.errors import ConfigError
from learner.config import ModelConfig

from .model import load_config, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_classifier(model: ModelConfig) -> None:
    """Raise ConfigError for a model that transformers does not know as a classifier with a head of `score.weight`."""
    from transformers import AutoModelForSequenceClassification

    config = _config(model, load_tokenizer(model))
    with torch.device("meta"):
        made = AutoModelForSequenceClassification.from_config(config)
    body, names = f"{made.base_model_prefix}.", set(made.state_dict())
    others = {name for name in names if not name.startswith(body)}
    if others != {"score.weight"} or made.base_model is made:
        raise ConfigError(
            f"model: transformers' {type(made).__name__} has the head {sorted(others)}; reward models have score.weight"
            " alone."
        )


def write_classifier_files(model: ModelConfig, directory: "Path", dtype: str = "") -> None:
    """Write config.json and the tokenizer's files, with the padding token that scores need. `dtype`: the number format
    of the weights beside them; by default `model.dtype`."""
    tokenizer = load_tokenizer(model)
    config = _config(model, tokenizer)
    config.dtype = dtype or model.dtype
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _config(model: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> "PretrainedConfig":
    """Return the model's configuration as a classifier's; `tokenizer` gets another padding token where it has to."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(model)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ConfigError(
            f"model: transformers has no sequence classifier of the type {config.model_type}, so a reward model of it"
            " could not be loaded. Start from a model of another type, such as qwen3 or llama."
        )
    config.architectures = [AutoModelForSequenceClassification._model_mapping[type(config)].__name__]
    config.num_labels = 1
    tokenizer.pad_token = _padding(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    return config


def _padding(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a special token that ends no response: the tokenizer's own, or another one where that is the stop
    token."""
    others = [token for token in (tokenizer.pad_token, *tokenizer.all_special_tokens) if token != tokenizer.eos_token]
    if not others:
        raise ConfigError(
            "model: the tokenizer's only special token is its eos_token. Scores of several texts at once need another"
            " one to pad with: set pad_token in the tokenizer's files."
        )
    return str(others[0])
