"""Models with adapters, and what they compute when their changes are added to the weights in the open."""

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.func import functional_call
from transformers import PreTrainedModel

from headway.learner.config import AdapterConfig, ModelConfig
from headway.learner.models.lora import Target, initial_factor, targets_of
from headway.learner.models.pretrained import load_model, load_tokenizer

ADAPTER = AdapterConfig(rank=4, alpha=8.0)
Factors = dict[str, torch.Tensor]


def with_adapter(model: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(model, adapter=replace(ADAPTER, **changes))


def saved_base(model: ModelConfig, directory: Path, seed: int = 7) -> ModelConfig:
    """Write the random model to the directory, and return it as a model with files."""
    made = load_model(model, seed)
    made.save_pretrained(directory)
    load_tokenizer(model).save_pretrained(directory)
    return replace(model, path=str(directory), random=None)


class InTheOpen(torch.nn.Module):
    """A transformers model whose weights are W + s B A, with gradients for A and B by autograd alone."""

    def __init__(self, model: PreTrainedModel, adapter: AdapterConfig, seed: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.targets = targets_of(model, adapter)
        self.scale = adapter.alpha / adapter.rank
        self.factors: Factors = {}
        for target in self.targets:
            first, second = target.factors
            self.factors[first] = initial_factor(target, adapter.rank, seed).requires_grad_()
            self.factors[second] = torch.zeros(target.shapes(adapter.rank)[1], requires_grad=True)

    def forward(self, **inputs: Any) -> Any:
        weights = dict(self.model.named_parameters())
        changed = {target.parameter: weights[target.parameter] + self._change(target) for target in self.targets}
        return functional_call(self.model, changed, (), inputs)

    def _change(self, target: Target) -> torch.Tensor:
        first, second = (self.factors[name] for name in target.factors)
        return self.scale * torch.einsum("...or,...ri->...oi", second, first)
