"""vLLM alone: as many tasks as requests at once, each reading one request after the other from AsyncLLM."""

import asyncio
import gc
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.learner.config import ModelConfig
from headway.learner.models.end_tokens import end_tokens
from headway.learner.models.model import load_tokenizer
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.abilities import REQUESTS
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.engines.vllm.vllm_engine import VllmEngine
from headway.rollout_workers.engines.vllm.vllm_requests import sampling

from .workload import Workload, prompts, rate, read_weights


def measure(order: object) -> dict[str, Any]:
    """Measure two laps in one process: with the worker's arguments, and as vLLM streams by default.

    Both have vLLM's own scheduler. By default vLLM returns a token at a time and a dictionary for each.
    """
    workload = msgspec.convert(order, Workload)
    engine = workload.engine
    if engine.kind == "vllm":
        engine = replace(engine, options={**engine.options, "scheduler_cls": None})
    return uvloop.run(_measure(replace(workload, engine=engine)))


async def _measure(workload: Workload) -> dict[str, Any]:
    directory = Path(workload.model_dir)
    engine = open_engine(workload.engine, directory, seed=0)
    assert isinstance(engine, VllmEngine)
    await engine.swap_weights(WeightVersion(1, 0), read_weights(directory, workload.engine.dtype))
    gc.collect()
    gc.freeze()  # as vLLM's own server does, and our worker
    llm = engine._llm
    result = {"same_arguments": await _lap(llm, workload, is_default=False)}
    llm.output_processor.stream_interval = 1
    result["default_streaming"] = await _lap(llm, workload, is_default=True)
    await engine.close()
    return result


async def _lap(llm: Any, workload: Workload, *, is_default: bool) -> dict[str, Any]:
    total, numbers = 0, count()
    waiting = (prompt for prompt in prompts() for _ in range(workload.group_size))
    stops = list(end_tokens(load_tokenizer(ModelConfig(path=workload.model_dir))).any)

    async def read() -> None:
        nonlocal total
        while True:
            request = GenerationRequest(
                request_id=f"{is_default}-{next(numbers)}",
                prompt_tokens=next(waiting),
                max_new_tokens=workload.max_new_tokens,
                temperature=1.0,
                stop_token_ids=stops,
            )
            params = sampling(request)
            params.flat_logprobs = not is_default
            inputs = {"prompt_token_ids": request.prompt_tokens}
            async for output in llm.generate(inputs, params, request.request_id):
                total += len(output.outputs[0].token_ids)

    readers = [asyncio.create_task(read()) for _ in range(workload.engine.max_concurrent or REQUESTS)]
    samples = []
    for pause_s in (workload.warm_up_s, workload.seconds):
        await asyncio.wait(readers, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        samples.append((time.monotonic(), float(total), time.process_time()))
    for reader in readers:
        reader.cancel()
    for reader in readers:
        with suppress(asyncio.CancelledError):
            await reader
    return rate(samples)
