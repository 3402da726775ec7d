"""A reward model's files, as `transformers.AutoModelForSequenceClassification` loads them.

A score is the head's output at the last token of a completed response: its stop token. transformers takes the last
token that is not the padding token instead, which is the same as long as no response ends with the padding token.
"""

from typing import TYPE_CHECKING

import torch

from headway.broker.errors import ConfigError
from headway.learner.config import ModelConfig

from .end_tokens import end_tokens
from .files import CONFIG, TOKENIZER_CONFIG, Files, change, kept_files
from .model import load_config, load_tokenizer

if TYPE_CHECKING:
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


def classifier_files(model: ModelConfig, *, dtype: str = "") -> Files:
    """Return the files that go along with the weights, with the padding token that scores need. `dtype`: the number
    format of the weights; by default `model.dtype`."""
    tokenizer = load_tokenizer(model)
    config = _config(model, tokenizer)
    files = kept_files(model, dtype=dtype)
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    named = {"architectures": config.architectures, "pad_token_id": config.pad_token_id}
    change(files, CONFIG, label | named)
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        if name in files:
            change(files, name, {"pad_token": tokenizer.pad_token})
    return files


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
    """Return a special token that ends no response: the tokenizer's own, or another one where that is an end token."""
    ends = end_tokens(tokenizer)
    ending = tokenizer.convert_ids_to_tokens([ends.text, ends.turn])
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    known = (tokenizer.pad_token, *tokenizer.all_special_tokens, *added)
    others = [token for token in known if token not in ending]
    if not others:
        raise ConfigError(
            f"model: the tokenizer's only special tokens end responses ({', '.join(sorted({*ending}))}). Scores of"
            " several texts at once need another one to pad with: set pad_token in the tokenizer's files."
        )
    return str(others[0])
