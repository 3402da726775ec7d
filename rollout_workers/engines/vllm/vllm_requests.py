"""A request in vLLM's words, and vLLM's outputs as chunks, with the experts that its routers chose.

With a request's first token vLLM's engine sends the rows of its prompt from `routed_experts_prompt_start` on, and with
every other token the row of the token before it. It does not send rows of tokens again that it recomputes, after a swap
or for lack of cache. A chunk promises exactly that. vLLM's public output has all rows only at the very end, so this
module takes them from where vLLM's front end gathers them. It was written against vLLM 0.26 and 0.32.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, WeightVersion
from headway.rollout_workers.engines.base import Chunk, FinishReason, GenerationRequest

VersionStarts = Sequence[tuple[WeightVersion, int]]
"""The versions that sampled a response, each with the position of the first token that is or would have been its own.
"""


def sampling(request: GenerationRequest) -> Any:
    """Return the request as vLLM's SamplingParams."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wants_experts = {} if request.experts_from is None else {"routed_experts_prompt_start": request.experts_from}
    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # no other code has them
        **wants_experts,
    )


def split(
    token_ids: list[int],
    logprobs: list[float],
    position: int,
    starts: VersionStarts,
    finish_reason: FinishReason | None,
    experts: Experts | None = None,
) -> Iterator[Chunk]:
    """Yield one chunk for each version in a run of tokens that begins at `position` of the response. `experts` ends
    with the row of the last token that was fed for it."""
    if not token_ids:  # interrupted, perhaps before any weights had sampled for it
        return
    rows = 0
    end = position + len(token_ids)
    bounds = [*(start for _, start in starts[1:]), end]
    for (version, start), stop in zip(starts, bounds, strict=True):
        lower, upper = max(start, position), min(stop, end)
        if lower < upper:
            first, rows = rows, 0 if experts is None else len(experts) - (end - upper)
            yield Chunk(
                token_ids=token_ids[lower - position : upper - position],
                logprobs=logprobs[lower - position : upper - position],
                version=version,
                experts=None if experts is None else experts[first:rows],
                finish_reason=finish_reason if upper == end else None,
            )


def ending(finish_reason: str | None) -> FinishReason | None:
    """Translate vLLM's finish reason; None if the response may go on, in this request or in the next."""
    match finish_reason:
        case "stop" | "length":
            return finish_reason
        case None | "abort":
            return None
        case other:
            raise HeadwayError(f"vLLM ended a request with {other!r}")


def expert_arguments(options: Mapping[str, object]) -> dict[str, Any]:
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


def take_rows(gathered: list[Experts], count: int) -> Experts:
    """Remove and return the first `count` rows that vLLM's front end has gathered. Raises HeadwayError if there are
    fewer."""
    rows = np.concatenate(gathered) if gathered else np.empty((0, 0, 0), np.uint8)
    if len(rows) < count:
        raise HeadwayError(f"vLLM told the experts of {len(rows)} tokens where it fed {count}: a bug in its adapter")
    gathered[:] = [rows[count:]] if len(rows) > count else []
    return rows[:count]
