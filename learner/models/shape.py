"""The sizes of a model from its transformers configuration: no weights are read or allocated."""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal

from headway.learner.config import AdapterConfig

from .lora import targets_of
from .pretrained import unfilled

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Part = Literal["embedding", "head", "column", "row", "experts", "whole"]
"""The way in which tensor parallelism splits a tensor: vocabulary rows, output features, input features, experts, none.

A column's bias is split with it; a row's is whole."""

LAYER = re.compile(r"\.layers\.(\d+)\.")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None
    """The index of the decoder layer; None for a parameter before or after the layers."""

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that determine memory and time, of models with gated feed-forward and grouped key/value heads."""

    parameters: tuple[Parameter, ...]
    """All parameters, tied tensors once."""
    layers: int
    width: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_width: int
    has_qk_norm: bool
    is_tied: bool
    experts: int
    """The number of experts of a layer; 0 for a dense model."""
    experts_per_token: int
    has_window: bool = False
    """Whether attention may see a window alone, by the configuration."""

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def active_weights(self) -> float:
        """The number of matrix weights that a token is multiplied with: chosen experts and output head, no
        embedding."""
        matrices = [p for p in self.parameters if len(p.shape) > 1 and p.part not in ("embedding", "head")]
        chosen = self.experts_per_token / max(self.experts, 1)
        return self.vocabulary * self.width + sum(p.size * (chosen if p.part == "experts" else 1) for p in matrices)

    @cached_property
    def ffn_width(self) -> int:
        """The width of the first layer's dense block, or of one of its experts."""
        return self._down(0).shape[-1]

    def feed_forward_width(self, layer: int) -> int:
        """Returns the width of the dense block, or of all the experts that a token chooses together."""
        down = self._down(layer)
        return down.shape[-1] * (self.experts_per_token if down.part == "experts" else 1)

    def _down(self, layer: int) -> Parameter:
        mine = [p for p in self.parameters if p.layer == layer]
        return next(p for p in mine if p.name.endswith(("down_proj", "down_proj.weight")))

    def has_experts(self, layer: int) -> bool:
        return any(p.part == "experts" for p in self.parameters if p.layer == layer)


def shape_of(config: "PretrainedConfig") -> ModelShape:
    """Returns the shape of the model that transformers would build, on torch's meta device."""
    model = unfilled(config)
    named = dict(model.named_parameters())
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return ModelShape(
        parameters=tuple(_parameter(name, tuple(tensor.shape)) for name, tensor in named.items()),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_width=head_width,
        has_qk_norm=any("q_norm" in name for name in named),
        is_tied=is_tied,
        experts=num_experts(config) if any(".experts." in n for n in named) else 0,
        experts_per_token=getattr(config, "num_experts_per_tok", None) or 0,
        has_window=has_window(config),
    )


def adapter_parameters(config: "PretrainedConfig", adapter: AdapterConfig) -> tuple[Parameter, ...]:
    """Returns the parameters of an adapter for the model that transformers would build. Raises ConfigError for targets
    that the model lacks."""
    return tuple(
        _parameter(name, shape)
        for target in targets_of(unfilled(config), adapter)
        for name, shape in zip(target.factors, target.shapes(adapter.rank), strict=True)
    )


def has_window(config: "PretrainedConfig") -> bool:
    """Returns whether attention may see a window alone."""
    return getattr(config, "sliding_window", None) is not None


def num_experts(config: "PretrainedConfig") -> int:
    """Returns the number of experts of a layer, by any of its names in configurations; 0 for a dense model."""
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    layer = LAYER.search(name)
    return Parameter(name=name, shape=shape, part=_part(name), layer=int(layer.group(1)) if layer else None)


def _part(name: str) -> Part:
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if ".experts." in name:
        return "experts"
    if module == "embed_tokens":
        return "embedding"
    if module == "lm_head":
        return "head"
    if module in COLUMNS:
        return "column"
    return "row" if module in ROWS and not name.endswith(".bias") else "whole"
