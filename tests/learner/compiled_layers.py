"""Layers of any number and length are compiled once: a script that fails where they are not.

The model has ten layers; torch compiles eight variants of one function. Graphs run as they are, uncompiled.
"""

import functools
from typing import Any
from unittest.mock import patch

import torch

import headway.learner.backends.fsdp.row
import headway.learner.models.attention
from headway.learner.backends.fsdp.policy import Policy, prepare_layers
from headway.learner.batching.packing import concatenate
from headway.learner.config import ComputeConfig
from headway.learner.models.pretrained import load_model
from tests.learner.tiny import alike, model_config, sequences, share

CASES: tuple[tuple[str, Any], ...] = (("qwen3", "none"), ("qwen3", "full"), ("qwen3_moe", "selective"))
LENGTHS = ([7, 12, 5, 20, 3, 9], [30, 4], [1100, 7])


@torch.library.custom_op("headway_tests::attention", mutates_args=())
def opaque(query: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """Stand for the variable-length kernel, which no CPU has, as a compiler sees it."""
    return query * scale


opaque.register_fake(lambda query, longest, scale: torch.empty_like(query))
opaque.register_autograd(
    lambda ctx, gradient: (gradient * ctx.scale, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
)


def kernel(q: torch.Tensor, k: Any, v: Any, cu: Any, also_cu: Any, longest: int, also: int, **options: Any) -> Any:
    found: Any = opaque(q + k.square().mean() + v.mean(), longest, options["scale"])
    return found


def check(architecture: str, recompute: Any) -> None:
    """Compare losses with those of uncompiled layers, and count the graphs."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    experts: dict[str, Any] = {"num_experts": 9} if architecture == "qwen3_moe" else {}
    config = model_config(architecture, num_hidden_layers=10, **experts)
    compiled, plain = (Policy(load_model(config, 1), on_cpu=True, half_precision=False) for _ in range(2))
    for policy in (compiled, plain):
        policy._varlen = True
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        prepare_layers(compiled.layers, ComputeConfig(compile=True, recompute=recompute))
    for is_tree in (False, True):
        for lengths in LENGTHS:
            batch = concatenate(alike(sequences(lengths), 3), is_tree=is_tree)
            losses = [share(batch, policy(batch, 0.8), 10.0) for policy in (compiled, plain)]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
            losses[0].backward()
        assert len(graphs) == 1 + is_tree, f"{architecture}, {recompute}: rows with shared tokens have another variant"


if __name__ == "__main__":
    with (
        patch.object(headway.learner.models.attention, "varlen_attn", kernel),
        patch.object(headway.learner.backends.fsdp.row, "check_alignment", lambda device: None),
    ):
        for case in CASES:
            check(*case)
