"""A model's first weights, one tensor at a time, by the names that Hugging Face files use."""

import torch

from headway.broker.errors import ConfigError
from headway.learner.backends.adapter_files import open_weights
from headway.learner.backends.hugging_face_files import Read, check_tied
from headway.learner.backends.score_head import SCORE_BIAS, SCORE_WEIGHT
from headway.learner.config import ModelConfig
from headway.learner.models.model import load_config, load_model


def open_source(model: ModelConfig, seed: int) -> Read:
    """Return a reader of the model's tensors; a random model is made whole. Raises ConfigError without files."""
    if model.random is not None:
        return _random_tensors(model, seed).__getitem__
    tensors = open_weights(model.path)
    if tensors is None:
        raise ConfigError(
            f"model.path: {model.path} has no safetensors files, and the megatron backend reads no others. Save the "
            "model once with transformers' save_pretrained, or use learner.backend=fsdp."
        )
    if load_config(model).tie_word_embeddings:
        check_tied(tensors.names, tensors, "lm_head.weight", "model.embed_tokens.weight")
    return tensors


def with_head(read: Read, first: torch.Tensor) -> Read:
    """Return a reader that also knows a head of one output, which has the weights `first` [1, W] and a bias of 0."""
    head = {SCORE_WEIGHT: first, SCORE_BIAS: torch.zeros(1)}
    return lambda name: head[name] if name in head else read(name)


def _random_tensors(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    made = load_model(model, seed)
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(made, made.state_dict())
    return tensors
