"""Sizes of known models, and the number of floating-point operations that training them takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}
"""bfloat16 without sparsity, by NVIDIA's datasheets, for a device whose name contains the key."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A Qwen3 model, dense or with experts in every layer."""

    hidden: int
    intermediate: int
    """The width of the dense feed-forward network."""
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int = 128
    vocabulary: int = 151936
    is_tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    def config(self) -> dict[str, Any]:
        """Return config.json, with the keys of the hub's file."""
        kind, architecture = ("qwen3_moe", "Qwen3MoeForCausalLM") if self.experts else ("qwen3", "Qwen3ForCausalLM")
        return {
            "architectures": [architecture],
            "model_type": kind,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 262144,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_value_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        } | (self._expert_config() if self.experts else {})

    def _expert_config(self) -> dict[str, Any]:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
        }

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that a token is multiplied with: all matrices but the input embedding.

        Of the experts only the token's own count.
        """
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        if self.experts:
            expert = 3 * self.hidden * self.expert_intermediate
            feed_forward = self.hidden * self.experts + self.experts_per_token * expert
        else:
            feed_forward = 3 * self.hidden * self.intermediate
        return self.layers * (attention + feed_forward) + self.hidden * self.vocabulary


class Flops(NamedTuple):
    """The operations of one training step, forward and backward, without recomputation."""

    active_parameters: int
    matrices: float
    """6 * active_parameters * tokens"""
    attention: float
    """12 * layers * heads * head_dim * sum(L * L) / 2: causal, so half of every square."""

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def step_flops(shape: Shape, lengths: Sequence[int]) -> Flops:
    """Return the operations of sequences of these lengths; a third of them is the forward pass."""
    return flops_of(shape, sum(lengths), sum(length * length for length in lengths))


def flops_of(shape: Shape, tokens: int, doubled_pairs: int, headless: int = 0) -> Flops:
    """Return the operations of these tokens, given twice the number of pairs of one and another that it attends to: a
    sequence of L tokens has L^2. `headless`: those among them that do not go through the output head."""
    return Flops(
        active_parameters=shape.active_parameters,
        matrices=6.0 * (shape.active_parameters * tokens - shape.hidden * shape.vocabulary * headless),
        attention=12 * shape.layers * shape.heads * shape.head_dim * float(doubled_pairs) / 2,
    )


def peak_flops(device_name: str) -> float | None:
    """Return the peak of one device, or None for an unknown one."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


SHAPES = {
    "smollm2-135m": Shape(
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        key_value_heads=3,
        head_dim=64,
        vocabulary=49152,
        is_tied=True,
    ),
    "qwen3-0.6b": Shape(hidden=1024, intermediate=3072, layers=28, heads=16, key_value_heads=8, is_tied=True),
    "qwen3-1.7b": Shape(hidden=2048, intermediate=6144, layers=28, heads=16, key_value_heads=8, is_tied=True),
    "qwen3-4b": Shape(hidden=2560, intermediate=9728, layers=36, heads=32, key_value_heads=8, is_tied=True),
    "qwen3-8b": Shape(hidden=4096, intermediate=12288, layers=36, heads=32, key_value_heads=8),
    "qwen3-30b-a3b": Shape(
        hidden=2048,
        intermediate=6144,
        layers=48,
        heads=32,
        key_value_heads=4,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
    ),
    "moe-2.4b": Shape(
        hidden=2048,
        intermediate=6144,
        layers=8,
        heads=16,
        key_value_heads=4,
        is_tied=True,
        experts=64,
        experts_per_token=8,
        expert_intermediate=640,
    ),
    "toy": Shape(
        hidden=64, intermediate=128, layers=2, heads=4, key_value_heads=2, head_dim=16, vocabulary=512, is_tied=True
    ),
    "toy-moe": Shape(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        key_value_heads=2,
        head_dim=16,
        vocabulary=512,
        experts=8,
        experts_per_token=2,
        expert_intermediate=32,
    ),
}


def shape_of(name: str, layers: int = 0) -> Shape:
    """Return the named shape; `layers` above 0 replaces its number of layers."""
    shape = SHAPES[name]
    return msgspec.structs.replace(shape, layers=layers) if layers else shape
