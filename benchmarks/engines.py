"""Tokens per second of the embedded engine, transformers' continuous batching and vLLM on the demo's model.

    python -m benchmarks.engines [--vllm] [--concurrent 64] [--requests 512] [--rounds 5]

The engines take turns on the same requests and the median round counts, so a busy machine disturbs the ratios
little. The last line is one JSON object. CPU seconds are those of this process: vLLM's are not among them.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine, GenerationRequest

VOCABULARY = 19

Round = Callable[[], Awaitable[int]]
"""Generates all requests, and returns the number of tokens."""


def demo_model(head_dim: int) -> PreTrainedModel:
    """Return the demo's model: Qwen3-MoE, 125k parameters with heads of 16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    return Qwen3MoeForCausalLM(config).eval()


def make_requests(count: int) -> list[GenerationRequest]:
    """Return prompts of 6 to 16 tokens, with responses of 8 to 32, as in the demo."""
    rng = random.Random(0)
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_tokens=[rng.randrange(VOCABULARY) for _ in range(rng.randint(6, 16))],
            max_new_tokens=rng.randint(8, 32),
            temperature=1.0,
            stop_token_ids=[],
        )
        for index in range(count)
    ]


def ours(engine: Engine, requests: list[GenerationRequest], concurrent: int) -> Round:
    """Keep `concurrent` requests in flight at any time, read by as many tasks, as a worker does."""

    async def reader(waiting: Iterator[GenerationRequest]) -> int:
        tokens = 0
        for request in waiting:
            async for chunk in engine.generate(request):
                tokens += len(chunk.token_ids)
        return tokens

    async def generate() -> int:
        waiting = iter(requests)
        return sum(await asyncio.gather(*[reader(waiting) for _ in range(concurrent)]))

    return generate


def transformers_manager(model: PreTrainedModel) -> Any:
    """Open transformers' own continuous batching, with logprobs, as large as this workload needs."""
    generation = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=32,
    )
    batching = ContinuousBatchingConfig(return_logprobs=True, num_blocks=256, page_size=64, max_batch_tokens=2048)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    return manager


def theirs(manager: Any, requests: list[GenerationRequest], concurrent: int) -> Round:
    """Run the same requests through transformers' manager: whole results without streaming, its fastest way."""

    def add(request: GenerationRequest) -> None:
        manager.add_request(request.prompt_tokens, max_new_tokens=request.max_new_tokens)

    async def generate() -> int:
        waiting = iter(requests)
        for _ in range(concurrent):
            add(next(waiting))
        tokens = finished = 0
        while finished < len(requests):
            result = manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
                for request in waiting:
                    add(request)
                    break
        return tokens

    return generate


async def measure(rounds: dict[str, Round], repeats: int) -> dict[str, Any]:
    """Return median tokens per second of wall clock and of CPU, after one round of each that does not count."""
    wall: dict[str, list[float]] = {name: [] for name in rounds}
    cpu: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(repeats + 1):
        for name, generate in rounds.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = await generate()
            if repeat:
                wall[name].append(tokens / (time.perf_counter() - started))
                cpu[name].append(tokens / (time.process_time() - cpu_started))
    return {
        name: {
            "tokens_per_s": round(statistics.median(wall[name])),
            "tokens_per_cpu_s": round(statistics.median(cpu[name])),
        }
        for name in rounds
    }


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare all engines on the same weights."""
    model, requests = demo_model(32 if arguments.vllm else 16), make_requests(arguments.requests)
    tensors = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    rounds: dict[str, Round] = {}
    engines = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model.config.save_pretrained(directory)
        for kind in ["embedded"] + ["vllm"] * arguments.vllm:
            config = EngineConfig(kind=kind, max_concurrent=arguments.concurrent, max_model_len=128)
            engine = open_engine(config, directory, seed=0)
            engines.append(engine)
            await engine.swap_weights(WeightVersion(1, 0), tensors)
            rounds[kind] = ours(engine, requests, arguments.concurrent)
        manager = transformers_manager(model)
        rounds["transformers"] = theirs(manager, requests, arguments.concurrent)
        result = await measure(rounds, arguments.rounds)
        manager.stop(block=True)
        for engine in engines:
            await engine.close()
    mine, other = result["embedded"], result["transformers"]
    result["embedded_over_transformers"] = {
        key: round(mine[key] / other[key], 2) for key in ("tokens_per_s", "tokens_per_cpu_s")
    }
    return {"concurrent": arguments.concurrent, "requests": arguments.requests, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too, with heads of 32: on a CPU it has no 16")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(asyncio.run(compare(arguments))))


if __name__ == "__main__":
    main()
