"""The difference between the logprobs of engine and learner for a sampled token, in bfloat16, dense and with experts.

    python -m benchmarks.agreement [--shape qwen3-0.6b,moe-2.4b] [--layers N] [--engine embedded,vllm]
        [--backend fsdp,megatron] [--prompts 64] [--tokens 256] [--device cuda|cpu] [--quantization fp8]

Each engine samples the same prompts at temperature 1 and each backend computes the logprobs of these samples, as the
product does, in processes of their own; with experts twice, with the engine's choices replayed and without. Weights are
random, wide enough that logprobs differ: a flat distribution would agree in spite of any error. With `--quantization`
vLLM rounds the weights further as they arrive, and its figures stand beside those without.

`difference` is |learner - engine| of a token, `sequence_ratio` is exp(sum of learner - engine) over a response, and
`own_choices_differ` is the share of the engine's choices of experts that the learner's router would not have made. The
last line is one JSON object.
"""

import argparse
import asyncio
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headway.broker.schema import Lease, Prompt, Trajectory, TrajectoryId, WeightVersion
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.packing import PackableSequence, concatenate, from_trajectory, pack
from headway.learner.batching.router_replay import routing_of
from headway.learner.config import ModelConfig, OptimizerConfig
from headway.learner.models.pretrained import load_config
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine, GenerationRequest
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from . import command
from .models import shape_of, written
from .processes import isolated, last_words

SCALE = 0.05
"""The standard deviation of every matrix."""
PROMPT_TOKENS = 32
MICRO_BATCH_TOKENS = 16384
AT_ONCE = 64


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process."""

    kind: str
    """The kind of the engine, or of the backend."""
    model: str
    has_experts: bool
    samples: str
    """A file of encoded trajectories, which the engine's process writes."""
    device: str
    prompts: int
    tokens: int
    quantization: str = ""
    """vLLM's option of this name; empty: none."""


def sample(told: object) -> dict[str, Any]:
    """Sample all prompts, in the engine's process."""
    order = msgspec.convert(told, Order)
    trajectories = asyncio.run(_sample(order))
    Path(order.samples).write_bytes(msgspec.msgpack.encode([encode_trajectory(one) for one in trajectories]))
    return {"tokens": sum(len(one.response_tokens) for one in trajectories)}


async def _sample(order: Order) -> list[Trajectory]:
    config = EngineConfig(
        kind=order.kind,
        max_concurrent=AT_ONCE,
        max_model_len=PROMPT_TOKENS + order.tokens + 1,
        dtype="bfloat16",
        device=order.device,
        options=_options(order),
    )
    engine = open_engine(config, Path(order.model), seed=0, tells_experts=order.has_experts)
    weights = _weights(order.model)
    await engine.swap_weights(WeightVersion(1, 0), [(name, torch.flip(tensor, [0])) for name, tensor in weights])
    await engine.swap_weights(WeightVersion(1, 1), weights)  # what is measured replaced another version
    drawn, vocabulary = random.Random(0), load_config(ModelConfig(path=order.model)).vocab_size
    prompts = [[drawn.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(order.prompts)]
    trajectories = await asyncio.gather(*[_trajectory(engine, order, *one) for one in enumerate(prompts)])
    await engine.close()
    return trajectories


def _options(order: Order) -> dict[str, Any]:
    if order.kind != "vllm":
        return {}
    quantized = {"quantization": order.quantization} if order.quantization else {}
    return {"gpu_memory_utilization": 0.7, **quantized}


def _weights(directory: str) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


async def _trajectory(engine: Engine, order: Order, number: int, tokens: list[int]) -> Trajectory:
    prompt = Prompt(
        group=f"0000-{number:08d}", token_ids=tokens, text="", ground_truth="", data_source="", num_samples=1
    )
    asked = GenerationRequest(
        request_id=str(number), prompt_tokens=tokens, max_new_tokens=order.tokens, temperature=1.0, stop_token_ids=[]
    )
    recorder = Recorder(prompt_length=len(tokens) if order.has_experts else None)
    await generate(engine, asked, recorder)
    lease = Lease(tid=TrajectoryId(prompt.group, 0, 0), token="t", ttl_s=1.0, prompt=prompt)
    return recorder.to_trajectory(lease, {}, 0.0, "agreement")


def compare(told: object) -> dict[str, Any]:
    """Compute the logprobs and compare them, in the learner's process."""
    order = msgspec.convert(told, Order)
    model = ModelConfig(path=order.model, dtype="bfloat16")
    backend = open_backend(order.kind, model, OptimizerConfig(), device=order.device)
    frames = msgspec.msgpack.decode(Path(order.samples).read_bytes(), type=list[bytes])
    routing = routing_of(load_config(model)) if order.has_experts else None
    figures: dict[str, Any] = {}
    for name, used in {"replay": routing, "plain": None}.items():
        if used is None and name == "replay":
            continue
        given = [
            sequence
            for frame in frames
            for sequence in from_trajectory(decode_trajectory(frame), advantages=1.0, step=0, max_lag=0, routing=used)
        ]
        figures[name] = differences(given, _learner_logprobs(backend, given))
        if used is not None:
            figures["own_choices_differ"] = _disagreement(backend, given)
    return figures


def _learner_logprobs(backend: Backend, given: Sequence[PackableSequence]) -> list[NDArray[np.float64]]:
    """Return the logprobs [R] of each response."""
    logprobs = []
    for one in given:  # packing changes nothing but rounding, and this keeps sequences apart
        (logprobs_T,) = backend.logprobs([concatenate([one])], 1.0)
        logprobs.append(logprobs_T.double().cpu().numpy()[one.prompt_length :])
    return logprobs


def differences(given: Iterable[PackableSequence], learner: Iterable[NDArray[np.float64]]) -> dict[str, Any]:
    """Return distributions over tokens, and over responses."""
    signed = [ours - one.behavior_logprobs.astype(np.float64) for one, ours in zip(given, learner, strict=True)]
    every = np.abs(np.concatenate(signed))
    ratios = np.exp([one.sum() for one in signed])
    return {
        "difference": _spread(every, {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}),
        "signed_mean": float(f"{np.concatenate(signed).mean():.3g}"),
        "sequence_ratio": _spread(ratios, {"min": 0, "p1": 1, "p50": 50, "p99": 99, "max": 100}),
        "tokens": int(every.size),
    }


def _spread(values: NDArray[np.float64], percentiles: dict[str, float]) -> dict[str, float]:
    named = {"mean": values.mean()} | {name: np.percentile(values, share) for name, share in percentiles.items()}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _disagreement(backend: Backend, given: Sequence[PackableSequence]) -> float:
    """Return the share of disagreement among all replayed choices; a step that changes nothing reports it."""

    def no_loss(_: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return current_T.sum() * 0.0, {}

    batches = pack(given, 0, 1, MICRO_BATCH_TOKENS)
    report = backend.step(batches, no_loss, 1.0, 0.0)[2][0]
    return round(report["router_disagreement_sum"] / report["router_disagreement_count"], 5)


def main() -> int:
    """Return the exit code: 1 if a case failed."""
    options = _parse()
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for shape in options.shape:
        device = options.device
        model = written(shape, options.layers, models=options.models, device=device, scale=SCALE)
        quantizations = ("", options.quantization) if options.quantization else ("",)
        for engine, quantization in product(options.engine, quantizations):
            if quantization and engine != "vllm":
                continue
            name = " ".join(filter(None, [shape, engine, quantization]))
            with tempfile.TemporaryDirectory(prefix="headway-agreement-") as samples:
                settings = {
                    "model": str(model),
                    "has_experts": bool(shape_of(shape).experts),
                    "samples": str(Path(samples, "trajectories")),
                    "device": device,
                    "prompts": options.prompts,
                    "tokens": options.tokens,
                    "quantization": quantization,
                }
                steps = [("sample", engine), *(("compare", backend) for backend in options.backend)]
                for function, kind in steps:
                    order = {"kind": kind, **settings}
                    outcome = isolated(f"benchmarks.agreement:{function}", order, 1, options.timeout_s)
                    label = f"{name} {kind}" if function == "compare" else name
                    command.tell(f"{label}: {outcome.get('error') or json.dumps(outcome['result'])}")
                    if "error" in outcome:
                        failed[label] = last_words(outcome)
                        if function == "sample":
                            break
                    elif function == "compare":
                        results[label] = outcome["result"]
    return command.finish({"device": options.device, "dtype": "bfloat16", **results, "failed": failed}, failed)


def _parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    has_megatron = importlib.util.find_spec("megatron") is not None
    shapes, engines = (
        (["qwen3-0.6b", "moe-2.4b"], ["embedded", "vllm"]) if on_gpu else (["toy", "toy-moe"], ["embedded"])
    )
    parser = command.parser(__doc__, "agreement")
    parser.add_argument("--shape", type=command.names, default=shapes)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--engine", type=command.names, default=engines)
    parser.add_argument("--backend", type=command.names, default=["fsdp", "megatron"] if has_megatron else ["fsdp"])
    parser.add_argument("--quantization", default="", help="of vLLM, such as fp8, beside none")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 64, help="of every response")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one process")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
