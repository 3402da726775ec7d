"""Refuses layouts that the ranks, the backend or the model's sizes rule out, before any process starts.

    check_splits    of the backend and the recipe
    check_ranks     of the recipe alone
    check_layout    of the model too, whose sizes must divide; of a model split by context alone: check_context
    check_sizes     of the sizes that config.json says, before torch is imported

All raise ConfigError with the numbers that do not fit.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway.broker.errors import ConfigError
from headway.learner.config import LayoutConfig

GROUPED_BYTES = 16
"""The alignment in bytes of the rows of a grouped matrix multiplication."""


class Sizes(Protocol):
    """The sizes of a decoder that a layout divides."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def key_value_heads(self) -> int: ...
    @property
    def ffn_width(self) -> int:
        """The width of the dense block, or of one expert."""
        ...

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 for a dense model."""
        ...


def check_splits(backend: str, splits: Collection[str], layout: LayoutConfig) -> None:
    """Checks that the backend can split a model in this way. `splits`: the keys of `learner.layout` that it has a use
    for."""
    for key, size in msgspec.structs.asdict(layout).items():
        if size > 1 and key not in splits:
            raise ConfigError(
                f"learner.layout.{key} is {size}, and learner.backend={backend} splits by {', '.join(splits)} alone."
                f" Set learner.layout.{key}=1 and raise learner.processes, or take another backend, such as megatron."
            )


def check_ranks(layout: LayoutConfig, processes: int) -> None:
    """Checks that `processes` ranks, of all machines, can be laid out in this way."""
    replica = layout.tensor * layout.pipeline * layout.context
    if processes % replica:
        raise ConfigError(
            f"learner.layout: learner.processes = {processes} (all ranks, of all machines) cannot be divided by"
            f" tensor * pipeline * context = {replica}, the ranks that hold one replica of the model."
        )
    _divides("ranks of a stage", processes // layout.pipeline, "expert * expert_tensor", experts_over(layout))
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise ConfigError(
            f"learner.layout.virtual_pipeline={layout.virtual_pipeline} interleaves layers of several stages, but "
            "learner.layout.pipeline is 1."
        )


def check_layout(layout: LayoutConfig, processes: int, sizes: Sizes, number_bytes: int) -> None:
    """Checks that every dimension of the layout divides what it splits. `number_bytes`: of one weight in the forward
    pass."""
    check_ranks(layout, processes)
    _divides("attention heads", sizes.heads, "tensor * context", layout.tensor * layout.context)
    _divides("key/value heads", sizes.key_value_heads, "tensor", layout.tensor)
    check_context(layout.context, sizes.heads // layout.tensor, sizes.key_value_heads // layout.tensor)
    _divides("hidden layers", sizes.layers, "pipeline * virtual_pipeline", layout.pipeline * layout.virtual_pipeline)
    if sizes.experts:
        _check_experts(layout, sizes, number_bytes)
        return
    _divides("feed-forward width", sizes.ffn_width, "tensor", layout.tensor)
    if experts_over(layout) > 1:
        raise ConfigError(
            f"learner.layout: expert={layout.expert} and expert_tensor={layout.expert_tensor} split experts, and the "
            "model has none; set both to 1."
        )


def check_context(context: int, heads: int, key_value_heads: int) -> None:
    """Checks that `context` ranks can share the heads that each tensor-parallel rank has; key/value heads may be
    repeated."""
    if heads % context or (key_value_heads % context and context % key_value_heads):
        raise ConfigError(
            f"learner.layout.context={context} does not divide the {heads} attention heads of the model, or of each of"
            f" its tensor-parallel ranks, or neither divides nor is a multiple of the {key_value_heads} key/value heads"
            " there; choose another size."
        )


@dataclass(frozen=True, kw_only=True)
class ConfigSizes:
    """The sizes that a configuration's own words say, as they stand in config.json."""

    layers: int
    heads: int
    key_value_heads: int
    ffn_width: int
    experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ConfigSizes | None":
        """Returns them; None where the configuration names them otherwise, or leaves some to transformers."""
        experts = config.get("num_experts") or 0
        width = "moe_intermediate_size" if experts else "intermediate_size"
        keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", width)
        found: list[Any] = [config.get(key) for key in keys]
        if not all(type(size) is int and size > 0 for size in (*found, experts or 1)):
            return None
        layers, heads, key_value_heads, ffn_width = found
        return cls(layers=layers, heads=heads, key_value_heads=key_value_heads, ffn_width=ffn_width, experts=experts)


def check_sizes(
    backend: str, layout: LayoutConfig, processes: int, config: Mapping[str, Any], number_bytes: int
) -> None:
    """Checks what can be known of a model from its configuration's own words alone; its backend checks all of it."""
    sizes = ConfigSizes.of(config)
    if sizes is None:
        return
    if check := _CHECKS.get(backend):
        check(layout, processes, sizes, number_bytes)


def experts_over(layout: LayoutConfig) -> int:
    """Returns the number of ranks that together hold all experts of a layer."""
    return layout.expert * layout.expert_tensor


def _check_experts(layout: LayoutConfig, sizes: Sizes, number_bytes: int) -> None:
    _divides("feed-forward width", sizes.ffn_width, "expert_tensor", layout.expert_tensor)
    _divides("experts", sizes.experts, "expert", layout.expert)
    row_bytes = sizes.ffn_width // layout.expert_tensor * number_bytes
    if row_bytes % GROUPED_BYTES:
        raise ConfigError(
            f"learner.layout.expert_tensor={layout.expert_tensor}: of an expert's width, {sizes.ffn_width}, each"
            f" rank would hold {row_bytes} bytes a row, and grouped multiplications take multiples of {GROUPED_BYTES}."
        )


def _divides(what: str, number: int, key: str, size: int) -> None:
    if number % size:
        raise ConfigError(f"learner.layout: {what} = {number} cannot be divided by {key} = {size}.")


def _check_context_alone(layout: LayoutConfig, processes: int, sizes: Sizes, number_bytes: int) -> None:
    check_context(layout.context, sizes.heads, sizes.key_value_heads)


_CHECKS: Mapping[str, Callable[[LayoutConfig, int, Sizes, int], None]] = {
    "fsdp": _check_context_alone,
    "megatron": check_layout,
}
