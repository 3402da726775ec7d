"""The experts that vLLM's routers chose (`enable_return_routed_experts`), as rows of `Chunk.experts`.

With a request's first token vLLM's engine sends the rows of its prompt from `routed_experts_prompt_start` on, and with
every other token the row of the token before it. It does not send rows of tokens again that it computes anew, after a
swap or for lack of cache. A chunk promises exactly that. vLLM's public output has all rows only at the very end, so
this module takes them from where vLLM's front end gathers them. It was written against vLLM 0.26 and 0.32.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts
from headway.rollout_workers.engines.base import GenerationRequest


def engine_arguments(options: Mapping[str, object]) -> dict[str, Any]:
    """Return what vLLM is started with. Raises HeadwayError where it cannot report experts: on a CPU, and in pipeline
    stages."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise HeadwayError(
            "vLLM tells which experts it chose on GPUs only (it takes Triton): set engine.kind=embedded, or"
            " algorithm.router_replay=false"
        )
    if options.get("pipeline_parallel_size", 1) != 1:
        raise HeadwayError(
            "vLLM does not tell which experts it chose with engine.options.pipeline_parallel_size="
            f"{options['pipeline_parallel_size']}: set it to 1, or algorithm.router_replay=false"
        )
    return {"enable_return_routed_experts": True}


def new_rows(request: GenerationRequest, position: int, count: int) -> int:
    """Return how many rows come with `count` tokens of the response from `position` on."""
    assert request.experts_from is not None
    return count if position else len(request.prompt_tokens) - request.experts_from + count - 1


def take(gathered: list[Experts], count: int) -> Experts:
    """Remove and return the first `count` rows that vLLM's front end has gathered. Raises HeadwayError if there are
    fewer."""
    rows = np.concatenate(gathered) if gathered else np.empty((0, 0, 0), np.uint8)
    if len(rows) < count:
        raise HeadwayError(f"vLLM told the experts of {len(rows)} tokens where it fed {count}: a bug in its adapter")
    gathered[:] = [rows[count:]] if len(rows) > count else []
    return rows[:count]
