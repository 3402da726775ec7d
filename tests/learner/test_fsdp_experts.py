"""Experts in grouped multiplications equal transformers' own loop over them."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from headway.learner.backends.fsdp.experts import EXPERTS_NAME, _grouped, experts_implementation
from headway.learner.backends.fsdp.policy import Policy, prepare_layers
from headway.learner.batching.packing import concatenate
from headway.learner.config import ComputeConfig
from headway.learner.models.pretrained import load_model
from tests.learner.tiny import model_config, sequences, share

FEW_TOKENS = [3, 4]
MANY_TOKENS = [7, 12, 5, 20, 3, 9]
EXPERTS = 24
"""A token chooses two experts, so there are more experts than seven tokens can choose."""


def run(implementation: str, recompute: Any, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Return the loss and every gradient."""
    policy = Policy(load_model(model_config("qwen3_moe", num_experts=EXPERTS), 1), on_cpu=True, half_precision=False)
    assert policy.model.config._experts_implementation == EXPERTS_NAME
    policy.model.config._experts_implementation = implementation
    prepare_layers(policy.layers, ComputeConfig(recompute=recompute))
    batch = concatenate(sequences(lengths))
    loss = share(batch, policy(batch, 0.8), 10.0)
    loss.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("lengths", [FEW_TOKENS, MANY_TOKENS], ids=["experts without tokens", "many tokens"])
def test_grouped_experts_are_the_loop_over_experts(recompute: Any, lengths: list[int]) -> None:
    got, expected = run(EXPERTS_NAME, recompute, lengths), run("eager", "none", lengths)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6)
    idle = (expected["model.model.layers.0.mlp.experts.down_proj"] == 0).flatten(1).all(1)
    assert idle.any() or lengths is MANY_TOKENS


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_any_number_of_tokens_is_compiled_once_in_bfloat16() -> None:
    """Graphs run as they are, uncompiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(_grouped, backend=backend, dynamic=True)
    experts = Experts()
    experts.gate_up_proj, experts.down_proj = (
        torch.nn.Parameter(torch.randn(8, *shape, dtype=torch.bfloat16)) for shape in ((32, 16), (16, 16))
    )
    for num_tokens in (5, 40):
        tokens = torch.randn(num_tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        chosen = torch.rand(num_tokens, 8).topk(2).indices
        weights = torch.rand(num_tokens, 2, requires_grad=True)
        leaves = (tokens, weights, *experts.parameters())
        expected, got = (function(experts, tokens, chosen, weights) for function in (_grouped, compiled))
        assert torch.equal(got, expected)
        gradients = [torch.autograd.grad(output.sum(), leaves) for output in (got, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert len(graphs) == 1


class Experts(torch.nn.Module):
    """Experts with the attributes by which transformers describes its own."""

    def __init__(self, **said: object) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()
        self.down_proj = torch.nn.Parameter(torch.zeros(8, 2, 2))
        plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
        for name, value in (plain | said).items():
            setattr(self, name, value)


class OwnGate(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up


@pytest.mark.parametrize(
    "experts",
    [Experts(has_bias=True), Experts(is_transposed=True), Experts(act_fn=torch.nn.GELU()), OwnGate()],
    ids=["biases", "transposed", "another activation", "another gate"],
)
def test_experts_of_other_arithmetic_are_left_to_transformers(experts: Experts) -> None:
    model = PreTrainedModel(PretrainedConfig(num_experts=8))
    model.experts = experts
    assert experts_implementation(model, few=4) == "grouped_mm"
    assert experts_implementation(model, few=8) == "eager"
