"""SGLang's own weight updates, with the same tensors: the peers of Headway's transfer into SGLang.

    python -m benchmarks.weight_sync.native_sglang ORDER     the trainer; it starts the engine as a process of its own

`distributed` is SGLang's own process group (NCCL, or gloo on a CPU), `tensor` hands the engine the trainer's memory, as
where both share a GPU. Tensors go in flat buckets. For each update the requests are retracted, and go on afterwards; no
prefix is cached, as SGLang would use those of older weights. One line of JSON an update.
"""

import asyncio
import base64
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.sglang.open_sglang import engine_arguments, prepare_environment, started
from headway.rollout_workers.engines.sglang.weight_loader import agreed, session

from .engine import PROMPT
from .order import REST_S, Order
from .tensors import Named, random_tensors, step
from .trainer import answer_of, free_port, tell

GROUP = "weight_update_group"
HOST = "127.0.0.1"


def train(order: Order, engine_gpu: str) -> None:
    """Run the trainer's side."""
    command = [sys.executable, "-m", "benchmarks.weight_sync.native_sglang", msgspec.json.encode(order).decode()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": engine_gpu}
    engine = subprocess.Popen(
        [*command, "engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    is_cpu = order.device == "cpu"
    prepare_environment(1)
    # By names, which a process of another parent can open.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    tensors = random_tensors(Path(order.model), getattr(torch, order.dtype), torch.device(order.device))
    answer_of(engine.stdout, "up")
    shares_gpu = engine_gpu == os.environ.get("CUDA_VISIBLE_DEVICES", "")
    ways = ["distributed", "tensor"] if is_cpu else ["tensor"] if shares_gpu else ["distributed"]
    group = _join(engine.stdin, engine.stdout, "gloo" if is_cpu else "nccl") if "distributed" in ways else None
    for number, way in itertools.product(range(order.versions), ways):
        time.sleep(REST_S)  # the engine must hear of an update at once
        step(tensors)
        if not is_cpu:
            torch.cuda.synchronize()
        began = time.monotonic()
        if way == "distributed":
            _broadcast(engine.stdin, order, tensors, group)
        else:
            _hand_over(engine.stdin, order, tensors)
        line = answer_of(engine.stdout, "resumed")
        line |= {"version": number, "way": way, "began": began, "bytes": sum(one.nbytes for _, one in tensors)}
        print(json.dumps(line), flush=True)
    engine.stdin.close()
    engine.wait()


def _join(to: IO[str], lines: IO[str], backend: str) -> Any:
    from sglang.srt.utils import init_custom_process_group

    port = free_port()
    joined = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2, "backend": backend}
    tell(to, {"join": joined | {"group_name": GROUP}})
    group = init_custom_process_group(
        backend=backend, init_method=f"tcp://{HOST}:{port}", world_size=2, rank=0, group_name=GROUP
    )
    answer_of(lines, "joined")
    return group


def _buckets(order: Order, tensors: list[Named]) -> Iterator[list[Named]]:
    """Yield all tensors, as many at a time as fit into a bucket."""
    bucket, nbytes = list[Named](), 0
    for name, tensor in tensors:
        if bucket and nbytes + tensor.nbytes > order.bucket_bytes:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((name, tensor))
        nbytes += tensor.nbytes
    yield bucket


def _broadcast(to: IO[str], order: Order, tensors: list[Named], group: Any) -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    buckets = list(_buckets(order, tensors))
    described = [
        {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        for bucket in buckets
    ]
    tell(to, {"distributed": described})
    for bucket in buckets:
        flat = FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor()
        torch.distributed.broadcast(flat, src=0, group=group)


def _hand_over(to: IO[str], order: Order, tensors: list[Named]) -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = [FlattenedTensorBucket(named_tensors=bucket) for bucket in _buckets(order, tensors)]
    given = [{"flattened_tensor": one.get_flattened_tensor(), "metadata": one.get_metadata()} for one in flat]
    tell(to, {"tensor": [base64.b64encode(MultiprocessingSerializer.serialize(one)).decode() for one in given]})


class _Served:
    """SGLang under load."""

    def __init__(self, order: Order) -> None:
        config = EngineConfig(
            kind="sglang",
            max_concurrent=order.requests,
            max_model_len=len(PROMPT) + order.new_tokens + 1,
            dtype=order.dtype,  # type: ignore[arg-type]
            options=order.options | {"disable_radix_cache": True},
        )
        architecture = json.loads(Path(order.model, "config.json").read_text())["architectures"][0]
        self.processes = started(engine_arguments(config, Path(order.model), architecture, 0))
        self.front = self.processes.front
        self._order = order
        self.latest = time.monotonic()

    async def generate(self, number: int) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"temperature": 1.0, "max_new_tokens": self._order.new_tokens, "ignore_eos": True}
        for count in itertools.count():
            asked = GenerateReqInput(
                input_ids=PROMPT, sampling_params=sampling, return_logprob=True, stream=True, rid=f"{number}-{count}."
            )
            seen = 0
            async for output in self.front.generate_request(asked, None):
                now = len(output["meta_info"].get("output_token_logprobs") or ())
                if now > seen:
                    self.latest, seen = time.monotonic(), now

    async def join(self, asked: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        agreed("join", await self.front.init_weights_update_group(InitWeightsUpdateGroupReqInput(**asked), None))

    async def update(self, command: dict[str, Any]) -> dict[str, float]:
        """Return the moments of an update."""
        from sglang.srt.managers import io_struct

        await self.front.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
        common = {"load_format": "flattened_bucket", "flush_cache": False}
        async with session(self.front):
            for bucket in command.get("distributed", ()):
                asked = io_struct.UpdateWeightsFromDistributedReqInput(**bucket, group_name=GROUP, **common)
                agreed("update", await self.front.update_weights_from_distributed(asked, None))
            for encoded in command.get("tensor", ()):
                given = [base64.b64decode(encoded)] * int(self._order.options.get("tp_size", 1))
                asked = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=given, **common)
                agreed("update", await self.front.update_weights_from_tensor(asked, None))
        loaded, last_old = time.monotonic(), self.latest
        await self.front.continue_generation(io_struct.ContinueGenerationReqInput())
        while self.latest <= loaded:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return {
            "last_old_token": last_old,
            "loaded": loaded,
            "resumed": time.monotonic(),
            "first_new_token": self.latest,
        }


async def serve(order: Order) -> None:
    """Run the engine's side: one command a line on standard input."""
    prepare_environment(1)
    served = _Served(order)
    tasks = [asyncio.create_task(served.generate(number)) for number in range(order.requests)]
    await asyncio.sleep(2)
    print(json.dumps({"up": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if "join" in command:
            await served.join(command["join"])
            print(json.dumps({"joined": True}), flush=True)
        else:
            print(json.dumps(await served.update(command)), flush=True)
    for task in tasks:
        task.cancel()
    await served.processes.close()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Order)
    if sys.argv[2:] == ["engine"]:
        asyncio.run(serve(given))
    else:
        train(given, os.environ["ENGINE_GPU"])
