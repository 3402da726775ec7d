"""The settings of SGLang in tests: on a GPU its own kernels and Triton's alone, which need no further package."""

from typing import Any

import torch
from transformers import PreTrainedModel

from headway.rollout_workers.config import EngineConfig

from .models import Architecture, make_model

ON_GPU: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 65_536,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
}
"""Options of one engine. The small cache leaves room for others, whatever part of the memory it may take."""


def sglang_model(architecture: Architecture, seed: int) -> PreTrainedModel:
    """Make a random model: on a GPU with heads of 64, the smallest for which SGLang has kernels, in bfloat16."""
    if not torch.cuda.is_available():
        return make_model(architecture, seed)
    return make_model(architecture, seed, head_dim=64).to(torch.bfloat16)


def sglang_config(max_concurrent: int, max_model_len: int) -> EngineConfig:
    """Return the configuration of an engine: in float32, or on a GPU, for which SGLang has no such kernels, in
    bfloat16."""
    if not torch.cuda.is_available():
        return EngineConfig(kind="sglang", max_concurrent=max_concurrent, max_model_len=max_model_len)
    return EngineConfig(
        kind="sglang",
        max_concurrent=max_concurrent,
        max_model_len=max_model_len,
        dtype="bfloat16",
        options=ON_GPU,
    )
