# mypy: disable-error-code="type-var"
"""Requests that the engine tests run, and the responses that come of them."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from headway.broker.errors import WeightSyncError
from headway.broker.schema import TrajectoryId, WeightVersion
from headway.broker.wire.codec import decode_segment, encode_segment
from headway.rollout_workers.engines.base import Check, Chunk, Engine, GenerationRequest, Parts
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from .models import STOP, forward_logprobs, named_tensors

_ids = count()
_steps = count(1)

PROMPTS = [[2, 3, 5, 7, 11], [9], [4, 8, 15, 16, 23, 42], list(range(3, 40)), [60, 50, 40], [7] * 12]


@dataclass
class Response:
    """The chunks of one sample, merged; `versions` has one entry for each token."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)
    finish_reason: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set once ten tokens are there."""

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        assert self.finish_reason is None
        assert len(chunk.token_ids) == len(chunk.logprobs) > 0
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.version] * len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        if len(self.tokens) >= 10:
            self.started.set()


def request(prompt: Sequence[int], **changes: Any) -> GenerationRequest:
    """Make a greedy request of at most 24 tokens, unless changed."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": [STOP]} | changes
    return GenerationRequest(request_id=f"r{next(_ids)}", prompt_tokens=list(prompt), **settings)


async def run(engine: Engine, asked: GenerationRequest, *, response: Response | None = None) -> Response:
    """Generate to the end."""
    response = response or Response(asked.prompt_tokens)
    async with aclosing(engine.generate(asked)) as chunks:
        async for chunk in chunks:
            response.add(chunk)
    return response


async def run_all(engine: Engine, prompts: Sequence[Sequence[int]], **changes: Any) -> list[Response]:
    """Run all requests concurrently."""
    return await asyncio.gather(*[run(engine, request(prompt, **changes)) for prompt in prompts])


async def begin(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 200
) -> tuple[list[Response], list["asyncio.Task[Response]"]]:
    """Begin requests of exactly so many tokens each, without stop tokens; return once every one has begun."""
    responses = [Response(prompt) for prompt in prompts]
    asked = [request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=tokens) for prompt in prompts]
    running = [
        asyncio.create_task(run(engine, one, response=response)) for one, response in zip(asked, responses, strict=True)
    ]
    await asyncio.gather(*[response.started.wait() for response in responses])
    return responses, running


async def hold(
    engine: Engine, model: PreTrainedModel, *, keep_cache: bool = False, check: Check | None = None
) -> WeightVersion:
    """Give the engine this model's weights under a new version."""
    version = WeightVersion(1, next(_steps))
    await engine.swap_weights(version, named_tensors(model), keep_cache=keep_cache, check=check)
    return version


async def in_parts(model: PreTrainedModel, count: int = 3, *, until: int | None = None) -> Parts:
    """Yield the model's tensors, so many at a time, in memory that is overwritten when the next ones are asked for.

    The transfer fails after `until` parts.
    """
    tensors = named_tensors(model)
    for number, first in enumerate(range(0, len(tensors), count)):
        if number == until:
            raise WeightSyncError("cut off")
        part = [(name, tensor.clone()) for name, tensor in tensors[first : first + count]]
        yield part
        for _, tensor in part:
            tensor.fill_(7)


async def hold_in_parts(engine: Engine, model: PreTrainedModel, check: Check | None = None) -> WeightVersion:
    """Give the engine this model's weights under a new version, without room for a second one."""
    version = WeightVersion(1, next(_steps))
    await engine.swap_in_parts(version, in_parts(model), check=check)
    return version


async def resume(engine: Engine, asked: GenerationRequest, first: Response, count: int) -> Response:
    """Go on after the first `count` tokens of a response, which arrived as a segment."""
    earlier = Recorder()
    for i in range(count):
        earlier.add(Chunk(token_ids=[first.tokens[i]], logprobs=[first.logprobs[i]], version=first.versions[i]))
    segment = decode_segment(encode_segment(earlier.segment(TrajectoryId("g", 0, 0), 0, 0)))
    recorder = Recorder([segment])
    await generate(engine, asked, recorder)
    versions = [span.version for span in recorder.spans for _ in range(span.start, span.end)]
    return Response(asked.prompt_tokens, recorder.tokens, recorder.logprobs, versions, recorder.finished())


def difference(model: PreTrainedModel, response: Response, temperature: float = 1.0) -> torch.Tensor:
    """Return [R] absolute differences between the engine's logprobs and a transformers forward's."""
    expected = forward_logprobs(model, response.prompt, response.tokens, temperature)
    return (expected - torch.tensor(response.logprobs)).abs()
