"""Which ranks hold which part of the model: Megatron's process groups, made from a LayoutConfig.

Ranks are numbered with tensor parallelism innermost, then context, replicas, and pipeline stages outermost.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from broker.errors import ConfigError
from learner.config import LayoutConfig

from .architecture import Architecture

_joined: list[LayoutConfig] = []
"""Megatron keeps its groups process-wide: at most one layout at a time."""


GROUPED_BYTES = 16
"""Rows of a grouped matrix multiplication begin at multiples of so many."""


def check_layout(layout: LayoutConfig, architecture: Architecture, world_size: int, element_bytes: int = 4) -> None:
    """Raises ConfigError for the first reason why these sizes cannot hold this model."""
    replica = layout.tensor * layout.pipeline * layout.context
    _divides("learner.processes (all ranks)", world_size, "tensor * pipeline * context", replica)
    tokens = world_size // layout.pipeline
    _divides("ranks of a pipeline stage", tokens, "expert * expert_tensor", layout.expert * layout.expert_tensor)
    _divides("attention heads", architecture.heads, "tensor * context", layout.tensor * layout.context)
    _divides("key/value heads", architecture.kv_heads, "tensor", layout.tensor)
    _divides(
        "hidden layers", architecture.layers, "pipeline * virtual_pipeline", layout.pipeline * layout.virtual_pipeline
    )
    _divides("feed-forward width", architecture.ffn_width, *_ffn_split(layout, architecture))
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise ConfigError(
            f"learner.layout.virtual_pipeline={layout.virtual_pipeline} interleaves layers of several stages, but "
            "learner.layout.pipeline is 1."
        )
    if architecture.experts:
        _divides("experts", architecture.experts, "expert", layout.expert)
        row_bytes = architecture.ffn_width // layout.expert_tensor * element_bytes
        if row_bytes % GROUPED_BYTES:
            raise ConfigError(
                f"learner.layout.expert_tensor={layout.expert_tensor}: of an expert's width, {architecture.ffn_width},"
                f" each rank would hold {row_bytes} bytes a row, and grouped matrix multiplications take multiples of"
                f" {GROUPED_BYTES}."
            )
    elif layout.expert > 1 or layout.expert_tensor > 1:
        raise ConfigError(
            f"learner.layout: expert={layout.expert} and expert_tensor={layout.expert_tensor} split experts, and the "
            "model has none; set both to 1."
        )


def _ffn_split(layout: LayoutConfig, architecture: Architecture) -> tuple[str, int]:
    return ("expert_tensor", layout.expert_tensor) if architecture.experts else ("tensor", layout.tensor)


def _divides(what: str, number: int, key: str, size: int) -> None:
    if number % size:
        raise ConfigError(f"learner.layout: {what} = {number} cannot be divided by {key} = {size}.")


@dataclass(frozen=True)
class Coordinates:
    """Where this rank stands."""

    rank: int
    world_size: int
    replica: int
    replicas: int
    is_lead: bool


def count_ranks() -> int:
    """Those that torchrun started, or this process alone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join(layout: LayoutConfig, device: str) -> Coordinates:
    """Make the groups of `layout`, unless they are there. Collective.

    A layout other than the last one replaces its groups: models of the last one can no longer be used.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        _init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if _joined != [layout]:
        if _joined:
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        _joined[:] = [layout]
    own = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return Coordinates(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        is_lead=own == (0, 0, 0),
    )


def _init_process_group(backend: str) -> None:
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def use_device(device: str) -> torch.device:
    """The rank's own."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("learner.device is cuda, but torch finds no CUDA device; set learner.device=cpu.")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())
