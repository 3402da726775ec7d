"""Megatron's view of a transformers configuration; models that it cannot hold are refused."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.broker.errors import ConfigError
from headway.learner.models.architectures import MEGATRON

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Head = Literal["policy", "value", "score"]
"""The end of the last pipeline stage: the model's own head, or one of a single output; a score's has no bias."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of equal layers: RMSNorm, rotary attention with grouped heads, gated SiLU, dense or of experts."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_width: int
    ffn_width: int
    """The width of the dense block, or of one expert."""
    experts: int
    """The number of experts of a layer; 0 for a dense model."""
    experts_per_token: int
    has_normalized_gates: bool
    """True if the chosen experts' probabilities are scaled to sum to 1."""
    vocabulary: int
    has_tied_head: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    norm_epsilon: float
    head: Head = "policy"


def architecture_of(config: "PretrainedConfig", head: Head = "policy") -> Architecture:
    """Return the architecture. Raises ConfigError for a model that the megatron backend does not train."""
    _check(config)
    is_moe = config.model_type == "qwen3_moe"
    heads = config.num_attention_heads
    return Architecture(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        key_value_heads=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_width=config.moe_intermediate_size if is_moe else config.intermediate_size,
        experts=config.num_experts if is_moe else 0,
        experts_per_token=config.num_experts_per_tok if is_moe else 0,
        has_normalized_gates=bool(is_moe and config.norm_topk_prob),
        vocabulary=config.vocab_size,
        has_tied_head=bool(config.tie_word_embeddings) and head == "policy",
        has_qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        has_qkv_bias=config.model_type == "qwen2",
        norm_epsilon=config.rms_norm_eps,
        head=head,
    )


def _check(config: "PretrainedConfig") -> None:
    if config.model_type not in MEGATRON:
        raise ConfigError(
            f"model: the megatron backend trains {', '.join(MEGATRON)}, not {config.model_type}; use "
            "learner.backend=fsdp."
        )
    reasons = {
        "a sliding window": getattr(config, "use_sliding_window", False),
        "an activation other than silu": config.hidden_act != "silu",
        "biases in its projections": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "quantized weights": getattr(config, "quantization_config", None) is not None,
        "dropout": getattr(config, "attention_dropout", 0.0),
        "dense layers among those of experts": getattr(config, "mlp_only_layers", None)
        or getattr(config, "decoder_sparse_step", 1) != 1,
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        raise ConfigError(
            f"model: this {config.model_type} has {' and '.join(found)}, which the megatron backend does not train; "
            "use learner.backend=fsdp."
        )
