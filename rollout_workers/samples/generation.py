"""One turn of a sample from an engine, to its end: over interruptions, and on from what another worker has generated of
it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import msgspec

from rollout_workers.engines.base import Chunk, Engine, FinishReason, GenerationRequest

from .recorder import EngineOutputError, Recorder

PAUSE_S = 0.1
"""After an interruption without a new token: the engine may be busy with what interrupted it."""
MOST_IN_VAIN = 3000
"""Requests in a row that were interrupted before their first token: five minutes, as for a swap."""


def _nobody(count: int) -> None:
    """Is told of new tokens."""


async def generate(
    engine: Engine, request: GenerationRequest, recorder: Recorder, on_tokens: Callable[[int], None] = _nobody
) -> None:
    """Record until the turn is finished, after what is recorded and heard already; `on_tokens` is told of every chunk.

    An error or cancelling ends the request. Raises EngineOutputError for output that cannot be, and where no
    request gets as far as a token.
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
    """Drain one request's stream, which must say how it ended."""
    reason = None
    async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)) as stream:
        async for chunk in stream:
            recorder.add(chunk)
            on_tokens(len(chunk.token_ids))
            reason = chunk.finish_reason
    if reason != "interrupted":
        recorder.finished()


def room(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> int:
    """Tokens that the response may still get, sampled or said."""
    longest = min(request.max_new_tokens, max_model_len - len(request.prompt_tokens))
    return longest - len(recorder.tokens) - len(recorder.heard)


def _ending(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> FinishReason | None:
    """Why the turn is finished; None if it may go on. One without tokens may."""
    if not recorder.tokens or recorder.heard:
        return None
    if recorder.tokens[-1] in request.stop_token_ids:
        return "stop"
    return None if room(request, recorder, max_model_len) > 0 else "length"


def _rest_of(request: GenerationRequest, recorder: Recorder, requests: int) -> GenerationRequest:
    """The request for what follows what is recorded and heard, named apart from those before it."""
    tokens, turn = [*recorder.tokens, *recorder.heard], len(recorder.turns) + bool(recorder.heard)
    name = ":".join([request.request_id, *([f"turn-{turn}"] if turn else []), *([str(requests)] if requests else [])])
    return msgspec.structs.replace(
        request,
        request_id=name,
        prompt_tokens=[*request.prompt_tokens, *tokens],
        max_new_tokens=request.max_new_tokens - len(tokens),
        seed=None if request.seed is None else request.seed + len(tokens),  # other noise than the first tokens had
        experts_from=recorder.experts_from,
    )
