# mypy: disable-error-code="operator"
"""Sequences with experts to be replayed, and the results of plain transformers in float64 for them."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_model
from tests.learner.test_fsdp import ordinary_logprobs
from tests.learner.tiny import model_config, share

LENGTHS = [7, 12, 5, 20, 3, 9]
TEMPERATURE = 0.8
LAYERS, CHOSEN, EXPERTS = 4, 2, 8


def model(experts: int = EXPERTS, **config: Any) -> ModelConfig:
    """Describe a model in which each token takes `CHOSEN` of so many experts in each of `LAYERS` layers."""
    return model_config("qwen3_moe", num_experts=experts, **({"num_hidden_layers": LAYERS} | config))


def with_experts(given: list[PackableSequence], experts: int, seed: int = 0) -> list[PackableSequence]:
    """Give each token but the last a random choice of two different experts."""
    rng = np.random.default_rng(seed)
    orders = [rng.random((len(one.token_ids) - 1, LAYERS, experts)).argsort(-1).astype(np.uint8) for one in given]
    return [dataclasses.replace(one, experts=order[..., :CHOSEN]) for one, order in zip(given, orders, strict=True)]


def forced_model(config: ModelConfig, experts_TLK: torch.Tensor) -> PreTrainedModel:
    """Return transformers' model in float64, whose router takes these experts for one sequence, as in the paper."""
    model = load_model(config, 1).double()
    model.config._experts_implementation = "eager"  # grouped multiplications know no float64
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = _forced(layer.mlp.gate, experts_TLK[:, number])
    return model


def _forced(gate: nn.Module, experts_TK: torch.Tensor) -> object:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE = hidden.view(-1, hidden.shape[-1]) @ gate.weight.T
        weights_TE = logits_TE.exp() / logits_TE.exp().sum(-1, keepdim=True)
        own_TK = weights_TE.argsort(-1, descending=True)[:, :CHOSEN]
        chosen_TK = torch.where(experts_TK < 0, own_TK, experts_TK.long())
        weights_TK = torch.stack([row[chosen] for row, chosen in zip(weights_TE, chosen_TK, strict=True)])
        if gate.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, chosen_TK

    return forward


def forced(
    config: ModelConfig, given: list[PackableSequence], denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logprobs [T] of all sequences, one at a time and never packed, and the gradient of `share` of all."""
    logprobs, gradients = [], dict[str, torch.Tensor]()
    for one in map(concatenate, [[sequence] for sequence in given]):
        assert one.experts_TLK is not None
        model = forced_model(config, one.experts_TLK)
        logprobs.append(ordinary_logprobs(model, one, TEMPERATURE))
        share(one, logprobs[-1], denominator).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + parameter.grad
    return torch.cat(logprobs).detach(), gradients
