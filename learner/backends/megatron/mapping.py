"""Each parameter of Megatron is bound to the Hugging Face tensors that it is made of, exactly in both directions.

`Architecture` is Megatron's view of a transformers configuration; models that it cannot hold are refused.

Megatron holds a layer's query, key and value rows in one matrix, group by group, its gate and up rows in another, and
this rank's experts in two. A `Binding` states this once for loading, publishing and checkpoints.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from headway.broker.errors import ConfigError
from headway.learner.backends.score_head import SCORE_BIAS, SCORE_WEIGHT
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


Tensors = tuple[torch.Tensor, ...]

HEAD = "output_layer.weight"


class TensorPlacement(Protocol):
    """The way in which the ranks of a group share the tensors of one parameter."""

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        """Return the part that rank `rank` of `size` holds."""
        ...

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        """Return the tensors, given all ranks' parts in order."""
        ...


class Replicate:
    """Every rank holds the whole tensor."""

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        return tensors[0]

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        return (parts[0],)


@dataclass(frozen=True)
class DimensionShard:
    """Ranks hold equal parts along one dimension."""

    dimension: int

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        return tensors[0].chunk(size, self.dimension)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        return (torch.cat(list(parts), self.dimension),)


@dataclass(frozen=True)
class VocabularyShard:
    """Ranks hold equal runs of rows, the last ones padded with zeros."""

    rows: int

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        (whole,) = tensors
        padding = whole.new_zeros(-self.rows % size, whole.shape[1])
        return torch.cat([whole, padding]).chunk(size)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        return (torch.cat(list(parts))[: self.rows],)


class StackedShard:
    """Several tensors, or equal parts of one, each split into equal runs of rows; a rank holds its runs one after the
    other."""

    def __init__(self, count: int, *, is_one: bool = False) -> None:
        self._count, self._is_one = count, is_one

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        tensors = tensors[0].chunk(self._count) if self._is_one else tensors
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        runs = [part.chunk(self._count) for part in parts]
        joined = tuple(torch.cat(list(column)) for column in zip(*runs, strict=True))
        return (torch.cat(joined),) if self._is_one else joined


@dataclass(frozen=True)
class QkvShard:
    """Query, key and value in one matrix: a key/value head's rows follow those of the query heads that use it."""

    key_value_heads: int
    head_width: int

    def split(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        groups = torch.cat([tensor.view(self.key_value_heads, -1, *tensor.shape[1:]) for tensor in tensors], 1)
        return groups.flatten(0, 1).chunk(size)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> Tensors:
        stacked = torch.cat(list(parts))
        groups = stacked.view(self.key_value_heads, -1, *stacked.shape[1:])
        of_query = groups.shape[1] - 2 * self.head_width
        return tuple(
            rows.flatten(0, 1) for rows in torch.split(groups, [of_query, self.head_width, self.head_width], 1)
        )


@dataclass(frozen=True)
class Binding:
    """One parameter of Megatron, or one expert's part of it, and its Hugging Face tensors."""

    parameter: str
    """The parameter's name in the model chunk that holds it."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the Hugging Face tensors."""
    sharing: TensorPlacement
    group: Literal["tensor", "expert_tensor"] = "tensor"
    expert: int | None = None
    """The index of the expert in its layer; the parameter holds the experts of one expert-parallel rank."""


def layer_bindings(architecture: Architecture, layer: int, local: int) -> Iterator[Binding]:
    """Yield the bindings of decoder layer `layer`, which is number `local` in the chunk that holds it."""
    source, target = f"model.layers.{layer}.", f"decoder.layers.{local}."
    width = architecture.width
    yield _norm(target + "input_layernorm.weight", source + "input_layernorm.weight", width)
    yield from _attention_bindings(architecture, target + "self_attention.", source + "self_attn.")
    yield _norm(target + "pre_mlp_layernorm.weight", source + "post_attention_layernorm.weight", width)
    if not architecture.experts:
        yield from _block_bindings(
            architecture, target + "mlp.linear_fc1.weight", target + "mlp.linear_fc2.weight", source + "mlp."
        )
        return
    router = (source + "mlp.gate.weight",)
    yield Binding(target + "mlp.router.weight", router, ((architecture.experts, width),), Replicate())
    for expert in range(architecture.experts):
        names = target + "mlp.experts.gate_up", target + "mlp.experts.down", source + f"mlp.experts.{expert}."
        yield from _block_bindings(architecture, *names, "expert_tensor", expert)


def _attention_bindings(architecture: Architecture, target: str, source: str) -> Iterator[Binding]:
    width, head_width = architecture.width, architecture.head_width
    groups = architecture.key_value_heads
    rows = [heads * head_width for heads in (architecture.heads, groups, groups)]
    interleaved = QkvShard(groups, head_width)
    for kind, inputs in (("weight", (width,)), ("bias", ())) if architecture.has_qkv_bias else (("weight", (width,)),):
        names = tuple(f"{source}{name}_proj.{kind}" for name in "qkv")
        yield Binding(f"{target}linear_qkv.{kind}", names, tuple((count, *inputs) for count in rows), interleaved)
    if architecture.has_qk_norm:
        yield _norm(target + "q_layernorm.weight", source + "q_norm.weight", head_width)
        yield _norm(target + "k_layernorm.weight", source + "k_norm.weight", head_width)
    yield Binding(target + "linear_proj.weight", (source + "o_proj.weight",), ((width, rows[0]),), DimensionShard(1))


def _block_bindings(
    architecture: Architecture,
    gate_up: str,
    down: str,
    source: str,
    group: Literal["tensor", "expert_tensor"] = "tensor",
    expert: int | None = None,
) -> Iterator[Binding]:
    """Yield the bindings of a dense block, or of one expert."""
    ffn, width = architecture.ffn_width, architecture.width
    names = (source + "gate_proj.weight", source + "up_proj.weight")
    yield Binding(gate_up, names, ((ffn, width), (ffn, width)), StackedShard(2), group, expert)
    yield Binding(down, (source + "down_proj.weight",), ((width, ffn),), DimensionShard(1), group, expert)


def _norm(target: str, source: str, width: int) -> Binding:
    return Binding(target, (source,), ((width,),), Replicate())


def embedding(architecture: Architecture, parameter: str = "embedding.word_embeddings.weight") -> Binding:
    """Return the binding of the embedding on the first stage; with a tied head, of its copy on the last one, too."""
    shape = (architecture.vocabulary, architecture.width)
    return Binding(parameter, ("model.embed_tokens.weight",), (shape,), VocabularyShard(architecture.vocabulary))


def last_bindings(architecture: Architecture) -> Iterator[Binding]:
    """Yield the bindings of the last stage's own tensors; a tied head is none."""
    yield _norm("decoder.final_layernorm.weight", "model.norm.weight", architecture.width)
    if architecture.head != "policy":
        yield Binding("value_head.weight", (SCORE_WEIGHT,), ((1, architecture.width),), Replicate())
        if architecture.head == "value":
            yield Binding("value_head.bias", (SCORE_BIAS,), ((1,),), Replicate())
    elif not architecture.has_tied_head:
        shape = (architecture.vocabulary, architecture.width)
        yield Binding(HEAD, ("lm_head.weight",), (shape,), VocabularyShard(architecture.vocabulary))
