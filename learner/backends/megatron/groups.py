"""Megatron's process groups of this rank, by what their ranks share. They exist once a layout was joined."""

from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state


def tensor() -> dist.ProcessGroup:
    """The ranks that share every matrix."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context() -> dist.ProcessGroup:
    """The ranks that share the tokens of a row."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def pipeline() -> dist.ProcessGroup:
    """The stages, first to last."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def expert() -> dist.ProcessGroup:
    """The ranks that share a layer's experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def expert_tensor() -> dist.ProcessGroup:
    """The ranks that share each expert's matrices."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())


def alike() -> dist.ProcessGroup:
    """The ranks that hold the same dense parameters: replicas, and the context ranks of each replica."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert_alike() -> dist.ProcessGroup:
    """The ranks that hold the same experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group())
