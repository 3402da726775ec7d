"""The head of one output that a critic or a reward model has in the place of the one over the vocabulary."""

import torch

from headway.broker.errors import ConfigError
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_config, load_tokenizer

from .hugging_face_files import TensorFiles, weight_files

SCORE_WEIGHT, SCORE_BIAS = "score.weight", "score.bias"
"""The weight's name in the files of transformers' sequence classifiers; the bias, which only critics have, is 0 at
first."""


def has_score_head(model: ModelConfig) -> bool:
    """Return whether `model.path` is a reward model. Raises ConfigError for files that cannot be read."""
    if model.random is not None:
        return False
    paths = weight_files(model.path)
    return bool(paths) and SCORE_WEIGHT in TensorFiles(paths).names


def first_head(model: ModelConfig, width: int, seed: int | None) -> torch.Tensor:
    """[1, width] fp32 weights: those of the model's files if it is a reward model. Others get random ones of variance
    1 / (width + 1), as in Stiennon et al. 2020 (arXiv:2009.01325), from `seed`, or zeros where that is None.

    Raises ConfigError for a head of another shape.
    """
    if has_score_head(model):
        return _of_files(model, width)
    head = torch.zeros(1, width)
    if seed is not None:
        head.normal_(std=(width + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    return head


def check_critic(model: ModelConfig, policy: ModelConfig) -> None:
    """Raise ConfigError unless `model` is a reward model to which tokens mean what they mean to the policy.

    Its size and its architecture may be others.
    """
    where = f"algorithm.critic.path: {model.path}"
    if not has_score_head(model):
        raise ConfigError(
            f"{where} is no reward model: it has no tensor {SCORE_WEIGHT}. Give what a reward_model stage has left, or"
            " leave the path out: the critic then starts from the policy's first weights, with a new head."
        )
    theirs, ours = load_tokenizer(model).get_vocab(), load_tokenizer(policy).get_vocab()
    rows = load_config(model).get_text_config().vocab_size
    if theirs != ours or rows <= max(ours.values()):
        raise ConfigError(
            f"{where} has another vocabulary ({len(theirs)} tokens, {rows} embeddings) than the policy"
            f" ({len(ours)} tokens), so tokens mean something else to it. Train a reward model from a model of the"
            " policy's family."
        )


def check_is_policy(model: ModelConfig) -> None:
    """Raise ConfigError for a reward model, which has no output over the vocabulary."""
    if has_score_head(model):
        raise ConfigError(
            f"model.path: {model.path} is a reward model, which scores text and writes none. Give the model that it was"
            " trained from, or another one that generates."
        )


def _of_files(model: ModelConfig, width: int) -> torch.Tensor:
    head = TensorFiles(weight_files(model.path))(SCORE_WEIGHT)
    if head.shape != (1, width):
        raise ConfigError(
            f"{model.path} has {SCORE_WEIGHT} of shape {list(head.shape)}; a model of scores with {width} features has"
            f" {[1, width]}."
        )
    return head.float()
