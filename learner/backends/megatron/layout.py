"""Megatron's process groups, made from a LayoutConfig: which ranks hold which part of the model.

Ranks are numbered with tensor parallelism innermost, then context, replicas, and pipeline stages outermost.
"""

from dataclasses import dataclass

import torch.distributed as dist

from headway.learner.config import LayoutConfig

_joined: list[LayoutConfig] = []
"""The joined layout, at most one: Megatron keeps its groups process-wide."""


@dataclass(frozen=True)
class Coordinates:
    """This rank among all ranks, and its replica among all replicas."""

    rank: int
    world_size: int
    replica: int
    replicas: int
    is_lead: bool


def join(layout: LayoutConfig) -> Coordinates:
    """Make the groups of `layout` out of all ranks, which have met, unless they exist. Collective.

    Another layout replaces the groups of the last one, whose models can no longer be used.
    """
    from megatron.core import parallel_state, tensor_parallel

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
