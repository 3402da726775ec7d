"""A request in vLLM's words, and vLLM's outputs as chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

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
