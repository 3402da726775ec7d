"""Refuses layouts that the ranks, the backend or the model's sizes rule out, before any process starts.

    check_ranks     of the recipe alone
    check_layout    of the model too, whose sizes must divide

Both raise ConfigError with the numbers that do not fit.
"""

from typing import Protocol

from broker.errors import ConfigError
from learner.config import LayoutConfig

GROUPED_BYTES = 16
"""Rows of a grouped matrix multiplication begin at multiples of so many."""

MEGATRON_ONLY = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
"""Keys of `learner.layout` that the fsdp backend has no use for."""


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
        """0: dense."""
        ...


def check_ranks(backend: str, layout: LayoutConfig, processes: int) -> None:
    """Checks that this backend can lay out `processes` ranks, of all machines, in this way."""
    if backend == "fsdp":
        for key in MEGATRON_ONLY:
            if getattr(layout, key) > 1:
                raise ConfigError(
                    f"learner.layout.{key} is {getattr(layout, key)}, and learner.backend=fsdp splits by context alone."
                    " Set learner.backend=megatron, or raise learner.processes: fsdp shards the model over all of them."
                )
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


def check_layout(backend: str, layout: LayoutConfig, processes: int, sizes: Sizes, number_bytes: int) -> None:
    """`number_bytes`: of one weight in the forward pass."""
    check_ranks(backend, layout, processes)
    if backend == "fsdp":
        check_context(layout.context, sizes.heads, sizes.key_value_heads)
        return
    _divides("attention heads", sizes.heads, "tensor * context", layout.tensor * layout.context)
    _divides("key/value heads", sizes.key_value_heads, "tensor", layout.tensor)
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
    """Checks that so many ranks can share the heads; key/value heads may be repeated."""
    if heads % context or (key_value_heads % context and context % key_value_heads):
        raise ConfigError(
            f"learner.layout.context={context} does not divide the model's {heads} attention heads, or neither divides"
            f" nor is a multiple of its {key_value_heads} key/value heads; choose another size."
        )


def experts_over(layout: LayoutConfig) -> int:
    """Ranks that hold all experts of a layer together."""
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
