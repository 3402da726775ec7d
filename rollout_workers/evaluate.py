"""The pass rate on held-out prompts, with the engine, sampling, rewards and environment that training uses."""

import asyncio
from collections.abc import Coroutine, Sequence
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from headway.broker.client.evaluations import EvaluationResult
from headway.broker.schema import Prompt

from .config import SamplingConfig
from .decoding import Decoding
from .engines.base import Engine
from .environments.base import Environment
from .environments.single_turn import SingleTurn
from .rewards.base import Reward
from .samples.episode import Episodes
from .samples.generation import generate
from .samples.held_out import held_out_request, play_held_out
from .samples.recorder import Recorder

T = TypeVar("T")


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the samples of all prompts; all are 0 if there were no prompts."""

    pass_rate: float
    """The share of samples that passed (pass@1)."""
    reward_mean: float
    response_tokens_mean: float
    prompts: int
    samples: int = 1
    """The samples of each prompt: k."""
    pass_at_k: float = 0.0
    """The share of prompts of which at least one sample passed (pass@k)."""
    reward: dict[str, float] = {}
    """The mean of each reward function's own score, of its measures and of the environment's, by name; each over the
    samples that have it."""


async def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Reward,
    decoding: Decoding,
    sampling: SamplingConfig,
    pass_reward: float,
    environment: Environment | None = None,
    *,
    samples: int = 1,
) -> EvalResult:
    """Sample each prompt `samples` times, as many at a time as the engine can batch. Without `environment` an episode
    has one turn."""
    episodes = Episodes(environment or SingleTurn(), reward, decoding)
    places = asyncio.Semaphore(engine.capacity)

    async def one(place: int, number: int, prompt: Prompt) -> EvaluationResult:
        recorder, request = Recorder(), held_out_request(place, number, prompt, sampling, decoding)

        async def turn() -> None:
            async with places:
                await generate(engine, request, recorder)

        return await play_held_out(
            episodes,
            prompt,
            recorder,
            request,
            turn,
            max_model_len=engine.max_model_len,
            pass_reward=pass_reward,
        )

    asked = [one(place, number, prompt) for place, prompt in enumerate(prompts) for number in range(samples)]
    return summarize(await all_of(asked), samples)


def summarize(results: Sequence[EvaluationResult], samples: int) -> EvalResult:
    """Return the means of results, `samples` of which follow each other for each prompt."""
    if not results:
        return EvalResult(pass_rate=0.0, reward_mean=0.0, response_tokens_mean=0.0, prompts=0, samples=samples)
    by_prompt = [results[first : first + samples] for first in range(0, len(results), samples)]
    names = {name for result in results for name in result.components}
    return EvalResult(
        pass_rate=fmean(result.passed for result in results),
        reward_mean=fmean(result.reward for result in results),
        response_tokens_mean=fmean(result.response_tokens for result in results),
        prompts=len(by_prompt),
        samples=samples,
        pass_at_k=fmean(any(result.passed for result in of_prompt) for of_prompt in by_prompt),
        reward={n: fmean(r.components[n] for r in results if n in r.components) for n in sorted(names)},
    )


async def all_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest, so that no request outlives the call."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
