"""The models of the comparison, written as Hugging Face directories."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.tiny import ALPHABET

SEED = 5
NORM_SPREAD = 0.2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of models and data."""

    sizes: dict[str, int]
    experts: dict[str, int]
    initializer_range: float
    alphabet: str
    """With padding and end it makes an odd vocabulary, which no split divides."""
    lengths: list[int]
    """The lengths of a step's sequences."""
    micro_batch_tokens: int


SHAPES = {
    "toy": Shape(
        sizes={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
        },
        experts={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        initializer_range=0.1,
        alphabet=ALPHABET,
        lengths=[60, 6, 7, 19, 11, 2, 25, 14],
        micro_batch_tokens=30,
    ),
    "small": Shape(
        sizes={
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 1024,
        },
        experts={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        initializer_range=0.03,
        alphabet="".join(chr(0x4E00 + index) for index in range(999)),
        lengths=[700, 31, 402, 256, 90, 511, 8, 333, 128, 640, 77, 205, 19, 480, 300, 64],
        micro_batch_tokens=1024,
    ),
}

MODELS: dict[str, Callable[[Shape], dict[str, int]]] = {
    "qwen3": lambda shape: {"tie_word_embeddings": True},
    "llama": lambda shape: {"tie_word_embeddings": False},
    "qwen3_moe": lambda shape: {"tie_word_embeddings": False, "norm_topk_prob": True, **shape.experts},
}
"""The settings of each model besides the shape's sizes, by transformers' model type."""


def vocabulary(shape: Shape) -> int:
    return len(shape.alphabet) + 2


def random_model(name: str, shape: Shape) -> ModelConfig:
    """Describe the model as a recipe would."""
    config = {**shape.sizes, **MODELS[name](shape), "initializer_range": shape.initializer_range}
    return ModelConfig(random=RandomModelConfig(architecture=name, config=config, alphabet=shape.alphabet))


def write_model(name: str, shape: Shape, directory: Path) -> None:
    """Write the model in fp32. Norms begin at 1, which would hide a mix-up of two norms, so they are spread."""
    described = random_model(name, shape)
    model = load_model(described, SEED)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(NORM_SPREAD * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    load_tokenizer(described).save_pretrained(directory)
