"""Models of a few thousand parameters and sequences to train them on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from headway.learner.backends.base import TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence
from headway.learner.config import ModelConfig, OptimizerConfig, RandomModelConfig

ALPHABET = "0123456789+-*=,#^"
VOCABULARY = len(ALPHABET) + 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
ENTROPY_COEFFICIENT = 0.2
"""The factor of the bonus for entropy in `ratio_loss`."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.1)


def model_config(
    architecture: str, *, dtype: Literal["float32", "bfloat16"] = "float32", tied: bool = True, **config: Any
) -> ModelConfig:
    sizes = SIZES | (EXPERTS if architecture == "qwen3_moe" else {}) | {"tie_word_embeddings": tied} | config
    random = RandomModelConfig(architecture=architecture, config=sizes, alphabet=ALPHABET)
    return ModelConfig(random=random, dtype=dtype)


def sequences(lengths: list[int], seed: int = 0) -> list[PackableSequence]:
    """Return random tokens with a prompt of a third, random masks, logprobs and advantages."""
    rng = np.random.default_rng(seed)
    return [_sequence(rng, length) for length in lengths]


def alike(given: Sequence[PackableSequence], count: int) -> list[PackableSequence]:
    """Return the sequences with the first `count` tokens of the first one."""
    beginning = given[0].token_ids[:count]
    return [
        replace(one, token_ids=np.concatenate([beginning, one.token_ids[count:]])[: len(one.token_ids)])
        for one in given
    ]


def _sequence(rng: np.random.Generator, length: int) -> PackableSequence:
    prompt_length = max(1, length // 3)
    response_length = length - prompt_length
    return PackableSequence(
        teacher_logprobs=np.linspace(-2, 0, response_length, dtype=np.float32),
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=(rng.random(response_length) < 0.8).astype(np.uint8),
        behavior_logprobs=-3 * rng.random(response_length).astype(np.float32),
        lags=rng.integers(0, 3, response_length),
        advantages=np.full(response_length, rng.normal(), np.float32),
    )


def ratio_loss(batches: list[PackedBatch], denominator: float) -> TokenLoss:
    """Return - sum of mask * advantage * exp(current - behavior) / denominator: every field of the batch matters. Of
    a batch that wants the confidence, less the same mean of ENTROPY_COEFFICIENT * entropy."""

    def loss(index: int, found_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        batch, bonus = batches[index], torch.zeros(())
        if batch.wants_confidence:
            found_T, _, entropies_T = found_T.unbind(1)
            bonus = ENTROPY_COEFFICIENT * (batch.loss_mask_T * entropies_T).sum() / denominator
        return share(batch, found_T, denominator) - bonus, {"tokens": float(batch.loss_mask_T.sum())}

    return loss


def share(batch: PackedBatch, logprobs_T: torch.Tensor, denominator: float) -> torch.Tensor:
    ratio_T = (logprobs_T - batch.behavior_logprobs_T).exp()
    return -(batch.loss_mask_T * batch.advantages_T * ratio_T).sum() / denominator
