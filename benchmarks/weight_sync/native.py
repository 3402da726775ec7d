"""vLLM's own NCCL weight transfer, packed, with the same tensors: the peer of Headway's transfer.

    python -m benchmarks.weight_sync.native ORDER     runs the trainer, which starts the engine as a process of its own

The engine generates the same requests; for every update it pauses them, as Headway's does. One line of JSON an update.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from headway.rollout_workers.engines.vllm.fork_server import prepare_environment

from . import REST_S, Order
from .engine import PROMPT
from .learner import random_tensors, step


def train(order: Order, engine_gpu: str) -> None:
    """Run the trainer's side."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    encoded = msgspec.json.encode(order).decode()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": engine_gpu}
    command = [sys.executable, "-m", "benchmarks.weight_sync.native", encoded, "engine"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert engine.stdin is not None
    assert engine.stdout is not None
    tensors = random_tensors(Path(order.model), getattr(torch, order.dtype), torch.device("cuda"))
    described = {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "packed": True,
    }
    answer_of(engine.stdout, "up")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tell(
        engine.stdin, {"join": {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}}
    )
    group = NCCLWeightTransferEngine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
    answer_of(engine.stdout, "joined")
    for number in range(order.versions):
        time.sleep(REST_S)  # the engine must hear of an update at once
        step(tensors)
        torch.cuda.synchronize()
        began = time.monotonic()
        tell(engine.stdin, {"update": described})
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(tensors), NCCLTrainerSendWeightsArgs(group=group, packed=True)
        )
        torch.cuda.synchronize()
        sent = time.monotonic()
        line = answer_of(engine.stdout, "resumed")
        line |= {"version": number, "began": began, "sent": sent, "bytes": sum(t.nbytes for _, t in tensors)}
        print(json.dumps(line), flush=True)
    engine.stdin.close()
    engine.wait()


def tell(to: IO[str], what: dict[str, Any]) -> None:
    to.write(json.dumps(what) + "\n")
    to.flush()


def answer_of(lines: IO[str], key: str) -> dict[str, Any]:
    """Return the next line with `key`; other lines are the engine's own."""
    for line in lines:
        if line.startswith("{") and key in (answer := json.loads(line)):
            return dict(answer)
    raise SystemExit("the engine ended early")


async def serve(order: Order) -> None:
    """Run the engine's side: one command a line on standard input."""
    prepare_environment(1)
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": order.model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": order.dtype,
        "max_model_len": len(PROMPT) + order.new_tokens + 1,
        "max_num_seqs": order.requests,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend="nccl"),
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments | order.options))
    latest = time.monotonic()

    async def generate(number: int) -> None:
        nonlocal latest
        params = SamplingParams(
            max_tokens=order.new_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for count in itertools.count():
            async for _ in llm.generate({"prompt_token_ids": PROMPT}, params, f"{number}-{count}"):
                latest = time.monotonic()

    tasks = [asyncio.create_task(generate(number)) for number in range(order.requests)]
    await asyncio.sleep(2)
    print(json.dumps({"up": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if "join" in command:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=command["join"]))
            print(json.dumps({"joined": True}), flush=True)
        else:
            await llm.pause_generation(mode="keep", clear_cache=True)
            paused = latest
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info=command["update"]))
            await llm.finish_weight_update()
            loaded = time.monotonic()
            await llm.resume_generation()
            while latest <= loaded:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            answer = {
                "last_old_token": paused,
                "loaded": loaded,
                "resumed": time.monotonic(),
                "first_new_token": latest,
            }
            print(json.dumps(answer), flush=True)
    for task in tasks:
        task.cancel()
    llm.shutdown()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Order)
    if sys.argv[2:] == ["engine"]:
        asyncio.run(serve(given))
    else:
        train(given, os.environ["ENGINE_GPU"])
