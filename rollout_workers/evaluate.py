"""The pass rate on held-out prompts, with the engine, sampling, rewards and environment that training uses."""

import asyncio
import zlib
from collections.abc import Coroutine, Sequence
from statistics import fmean
from typing import Any

import msgspec

from broker.schema import Prompt

from .config import SamplingConfig
from .decoding import Decoding
from .engines.base import Engine, GenerationRequest
from .environments.base import Environment
from .environments.single_turn import SingleTurn
from .rewards.base import Scorer
from .samples.episode import Episodes
from .samples.generation import generate, room
from .samples.recorder import Recorder


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over one sample of each prompt; all are 0 if there were no prompts."""

    pass_rate: float
    reward_mean: float
    response_tokens_mean: float
    prompts: int


class _Sample(msgspec.Struct, frozen=True):
    reward: float
    response_tokens: int


async def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    decoding: Decoding,
    sampling: SamplingConfig,
    pass_reward: float,
    environment: Environment | None = None,
) -> EvalResult:
    """Sample each prompt once, as many at a time as the engine can batch. Without `environment` an episode has one
    turn.

    A seed depends only on its prompt and the prompt's place, so the same weights give the same result on an engine that
    honours seeds.
    """
    episodes = Episodes(environment or SingleTurn(), scorer, decoding)
    places = asyncio.Semaphore(engine.capacity)

    async def one(index: int, prompt: Prompt) -> _Sample:
        recorder, request = Recorder(), _request(index, prompt, sampling, decoding)
        async with places:
            judged = await episodes.play(
                prompt,
                recorder,
                lambda: generate(engine, request, recorder),
                lambda: room(request, recorder, engine.max_model_len),
            )
        judged = judged or await episodes.judge(prompt, recorder, 0)
        return _Sample(recorder.earned + judged.reward, len(recorder.tokens))

    return _summary(await _all([one(i, prompt) for i, prompt in enumerate(prompts)]), pass_reward)


def _request(index: int, prompt: Prompt, sampling: SamplingConfig, decoding: Decoding) -> GenerationRequest:
    name = f"eval:{index}:{prompt.group}"
    return GenerationRequest(
        request_id=name,
        prompt_tokens=prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(decoding.stop_token_ids),
        seed=zlib.crc32(name.encode()),
    )


async def _all(samples: Sequence[Coroutine[Any, Any, _Sample]]) -> list[_Sample]:
    """Return all results in order. The first error cancels the rest, so that no request outlives the call."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _summary(samples: Sequence[_Sample], pass_reward: float) -> EvalResult:
    if not samples:
        return EvalResult(pass_rate=0.0, reward_mean=0.0, response_tokens_mean=0.0, prompts=0)
    return EvalResult(
        pass_rate=fmean(sample.reward >= pass_reward for sample in samples),
        reward_mean=fmean(sample.reward for sample in samples),
        response_tokens_mean=fmean(sample.response_tokens for sample in samples),
        prompts=len(samples),
    )
