"""Generates one turn of a sample to its end: it repeats interrupted requests, and continues what another worker
generated."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import msgspec

from headway.broker.errors import HeadwayError
from headway.broker.schema import Lease
from headway.rollout_workers.config import SamplingConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import Chunk, Engine, FinishReason, GenerationRequest

from .recorder import EngineOutputError, Recorder

PAUSE_S = 0.1
"""Seconds to wait after a request that was interrupted before a new token: the engine may be busy with the cause."""
MOST_IN_VAIN = 3000
"""Requests in a row that may be interrupted before their first token. With `PAUSE_S` they take five minutes, as long as
a swap may."""


class EngineFailedError(HeadwayError):
    """The engine failed at one request; the sample is handed back."""


def _ignore(count: int) -> None:
    """Ignore new tokens."""


async def generate(
    engine: Engine, request: GenerationRequest, recorder: Recorder, on_tokens: Callable[[int], None] = _ignore
) -> None:
    """Record one turn to its end, after the tokens that are recorded and heard already. `on_tokens` gets the number of
    tokens of every chunk.

    An error or a cancellation ends the request. Raises EngineOutputError for impossible output, and if no request gets
    as far as a token.
    """
    requests = in_vain = 0
    recorder.finish_reason = _ending(request, recorder, engine.max_model_len)
    while recorder.finish_reason is None:
        before = len(recorder.tokens)
        await _record(engine.generate(_rest_of(request, recorder, requests)), recorder, on_tokens)
        recorder.finish_reason = recorder.finish_reason or _ending(request, recorder, engine.max_model_len)
        requests += 1
        in_vain = 0 if len(recorder.tokens) > before else in_vain + 1
        if in_vain > MOST_IN_VAIN:
            raise EngineOutputError(f"the engine interrupted {in_vain} requests in a row before their first token")
        if in_vain:
            await asyncio.sleep(PAUSE_S)


async def _record(chunks: object, recorder: Recorder, on_tokens: Callable[[int], None]) -> None:
    """Record one request's stream. Its last chunk must say how it ended."""
    reason = None
    async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)) as stream:
        async for chunk in stream:
            recorder.add(chunk)
            on_tokens(len(chunk.token_ids))
            reason = chunk.finish_reason
    if reason != "interrupted":
        recorder.finished()


def request_of(lease: Lease, sampling: SamplingConfig, decoding: Decoding) -> GenerationRequest:
    """Return the request for a whole response to the lease's prompt."""
    return GenerationRequest(
        request_id=f"{lease.tid}:{lease.token}",
        prompt_tokens=lease.prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(decoding.stop_token_ids),
        seed=sample_seed(sampling.seed, lease.tid.group, lease.tid.sample),
    )


def sample_seed(seed: int | None, group: str, sample: int) -> int | None:
    """Return the seed of one sample's own random numbers, from `sampling.seed`; None: the engine draws freely."""
    return None if seed is None else zlib.crc32(f"{seed}:{group}:{sample}".encode())


def room(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> int:
    """Return how many tokens the response may still get, sampled by the model or said by the environment."""
    longest = min(request.max_new_tokens, max_model_len - len(request.prompt_tokens))
    return longest - len(recorder.tokens) - len(recorder.heard)


def _ending(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> FinishReason | None:
    """Return why the turn is finished, or None if it may go on. A turn without tokens may go on."""
    if not recorder.tokens or recorder.heard:
        return None
    if recorder.tokens[-1] in request.stop_token_ids:
        return "stop"
    return None if room(request, recorder, max_model_len) > 0 else "length"


def _rest_of(request: GenerationRequest, recorder: Recorder, requests: int) -> GenerationRequest:
    """Return the request for what follows the recorded and heard tokens, under a name of its own."""
    tokens, turn = [*recorder.tokens, *recorder.heard], len(recorder.turns) + bool(recorder.heard)
    name = ":".join([request.request_id, *([f"turn-{turn}"] if turn else []), *([str(requests)] if requests else [])])
    return msgspec.structs.replace(
        request,
        request_id=name,
        prompt_tokens=[*request.prompt_tokens, *tokens],
        max_new_tokens=request.max_new_tokens - len(tokens),
        seed=None if request.seed is None else request.seed + len(tokens),  # not the noise of the first tokens again
        experts_from=recorder.experts_from,
    )
