"""vLLM with an adapter: seconds to start, and tokens/s, by the CUDA graphs that it records.

    python -m benchmarks.adapter_graphs [--settings ours,fine] [--width 2048] [--layers 28] [--rank 16]
        [--concurrent 256] [--prompts 1024] [--tokens 256] [--repeats 2] [--device cuda|cpu] [--limit-s 500]

A random dense Qwen3 in bfloat16, whose adapter all requests use. `--concurrent` of them run at once, each with a prompt
of 32 tokens and a response of 16 to twice `--tokens` tokens, until `--prompts` have ended. `ours`: as the engine is
started for a run; `fine`: with all the sizes that vLLM records by itself. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine

from .adapter_sync import PROMPT_TOKENS, SCALE, Study, generated, on_host

SETTINGS: dict[str, dict[str, Any]] = {"ours": {}, "fine": {"max_cudagraph_capture_size": 512}}
SHORTEST = 16


async def measured(study: Study, options: argparse.Namespace, directory: Path, setting: str) -> dict[str, Any]:
    """Return the figures of one engine."""
    room = {"gpu_memory_utilization": 0.6} if options.device == "cuda" else {}
    config = EngineConfig(
        kind="vllm",
        max_concurrent=options.concurrent,
        max_model_len=PROMPT_TOKENS + 2 * options.tokens + 1,
        dtype="bfloat16",
        device=options.device,
        options={**room, **SETTINGS[setting]},
    )
    started = time.monotonic()
    engine: Any = open_engine(config, directory, seed=0, adapter_rank=options.rank)
    try:
        start_s = time.monotonic() - started
        await engine.load_base(on_host(study.whole(0)))
        loaded_s = time.monotonic() - started - start_s
        await engine.swap_adapter(WeightVersion(1, 1), on_host(study.adapter(1)), SCALE)
        rates = [await _tokens_per_s(engine, options, number) for number in range(options.repeats)]
    finally:
        await engine.close()
    return {"start_s": round(start_s, 2), "base_s": round(loaded_s, 2), "tokens_per_s": [round(one) for one in rates]}


async def _tokens_per_s(engine: Any, options: argparse.Namespace, number: int) -> float:
    drawn, places, count = random.Random(0), asyncio.Semaphore(options.concurrent), 0
    lengths = [drawn.randint(SHORTEST, 2 * options.tokens) for _ in range(options.prompts)]

    async def one(index: int) -> None:
        nonlocal count
        prompt = [drawn.randrange(2, options.vocabulary) for _ in range(PROMPT_TOKENS)]
        async with places:
            tokens, _, _ = await generated(engine, f"{number}-{index}", prompt, lengths[index])
        count += len(tokens) - PROMPT_TOKENS

    began = time.monotonic()
    await asyncio.gather(*(one(index) for index in range(options.prompts)))
    return count / (time.monotonic() - began)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        study = Study(options, Path(directory))
        for setting in options.settings.split(","):
            found[setting] = await measured(study, options, Path(directory), setting)
            print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=500.0)
    options = parser.parse_args()
    options.dtype = "bfloat16"  # which `Study` asks for
    print(json.dumps(asyncio.run(asyncio.wait_for(_measure(options), options.limit_s))))


if __name__ == "__main__":
    main()
