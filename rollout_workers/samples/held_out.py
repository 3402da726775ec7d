"""One sample of a held-out prompt, as every evaluation makes it, wherever it runs."""

import zlib
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from headway.broker.client.evaluations import EvaluationResult
from headway.broker.schema import Prompt
from headway.rollout_workers.config import EvalConfig, SamplingConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import GenerationRequest

from .episode import Episodes
from .generation import room
from .recorder import Recorder


def evaluation_sampling(sampling: SamplingConfig, config: EvalConfig) -> SamplingConfig:
    """Return how evaluations sample; a temperature of 0 decodes greedily."""
    return sampling if config.temperature is None else replace(sampling, temperature=config.temperature)


def held_out_request(
    place: int, number: int, prompt: Prompt, sampling: SamplingConfig, decoding: Decoding
) -> GenerationRequest:
    """Return the request for sample `number` of the prompt at `place` of the held-out ones.

    Its seed depends on nothing else, so the same weights give the same result on an engine that honours seeds.
    """
    name = f"eval:{place}:{prompt.group}" + (f":{number}" if number else "")
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


async def play_held_out(
    episodes: Episodes,
    prompt: Prompt,
    recorder: Recorder,
    request: GenerationRequest,
    generate: Callable[[], Awaitable[None]],
    *,
    max_model_len: int,
    pass_reward: float,
) -> EvaluationResult:
    """Play an episode to its end and return its result. `generate` records a turn to its end. Raises as
    `Episodes.play` does."""
    judged = await episodes.play(prompt, recorder, generate, lambda: room(request, recorder, max_model_len))
    judged = judged or await episodes.judge(prompt, recorder, 0)
    reward = recorder.earned + judged.reward
    return EvaluationResult(reward >= pass_reward, reward, len(recorder.tokens), judged.components)
