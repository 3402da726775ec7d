"""Samples per second that a reward model scores, run by transformers and by vLLM's pooling runner.

    python -m benchmarks.scorers [--shape qwen3-1.7b] [--layers N] [--engines transformers,vllm] [--device cuda|cpu]
        [--dtype bfloat16] [--groups 128] [--group-size 8] [--prompt-tokens 256] [--response-tokens 1024]
        [--batch-tokens 16384] [--options '{"enforce_eager": false}'] [--timeout-s 240]

The weights are random, and those of the head, too. Each engine has a process of its own, which scores the same samples
in the batches that a scorer makes of its leases, without the broker. The samples of a group share their prompt,
and arrive by groups, the short ones first. Responses have a quarter to seven quarters of `--response-tokens`, each
length as often. `--options` are `scorers.engine.options` of vLLM. Other samples are scored first, and do not count.

The last line is one JSON object: of each engine `samples_per_s`, `tokens_per_s`, the seconds of its start, the mean
batch, and the most bytes of GPU memory that torch held; `ratio` is vLLM's samples over those of transformers, and
`difference` the largest one between their scores, in standard deviations of the scores.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.throughput import checkpoint, isolated
from benchmarks.throughput.results import last_words
from benchmarks.throughput.shapes import shape_of
from headway.broker.client.scoring import ScoreLease
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.config import ScorerEngineConfig, ScorersConfig
from headway.rollout_workers.scorers.base import Runner
from headway.rollout_workers.scorers.runtimes import open_runner
from headway.rollout_workers.scorers.serving import BATCHES_AHEAD, next_batch

GROUPS_AT_ONCE = 16
"""Groups whose samples arrive together."""
HEAD = "score.weight"
LEAST_HEAD_DIM = 32
"""vLLM's attention on CPUs has no kernel for smaller heads."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process."""

    engine: str
    options: dict[str, Any]
    model: str
    device: str
    dtype: str
    groups: int
    group_size: int
    prompt_tokens: int
    response_tokens: int
    batch_tokens: int


def score(told: object) -> dict[str, Any]:
    """Score all samples with one engine, in a process of its own."""
    order = msgspec.convert(told, Order)
    vocabulary = json.loads(Path(order.model, "config.json").read_text())["vocab_size"]
    samples = list(_samples(order, order.groups, vocabulary, seed=0))
    began = time.perf_counter()
    runner = open_runner(
        "reward_model",
        order.model,
        ScorersConfig(
            engine=ScorerEngineConfig(kind=order.engine, options=order.options),
            device=order.device,
            dtype=order.dtype,  # type: ignore[arg-type]
            batch_tokens=order.batch_tokens,
            threads=torch.get_num_threads(),
        ),
        key="--model",
        most_tokens=order.prompt_tokens + 2 * order.response_tokens,
    )
    started = time.perf_counter()
    _score_all(runner, list(_samples(order, GROUPS_AT_ONCE, vocabulary, seed=1)), order.batch_tokens)
    warm = time.perf_counter()
    scores, batches = _score_all(runner, samples, order.batch_tokens)
    seconds = time.perf_counter() - warm
    tokens = sum(map(_length, samples))
    return {
        "samples_per_s": round(len(samples) / seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "mean_batch": round(len(samples) / batches, 1),
        "start_s": round(started - began, 1),
        "gpu_bytes": torch.cuda.max_memory_allocated() if order.device != "cpu" else 0,
        "scores": scores,
    }


def _samples(order: Order, groups: int, vocabulary: int, seed: int) -> Iterator[ScoreRequest]:
    """Yield the samples in the order in which they arrive."""
    rng = np.random.default_rng(seed)
    for first in range(0, groups, GROUPS_AT_ONCE):
        arriving = []
        for _ in range(min(GROUPS_AT_ONCE, groups - first)):
            prompt = rng.integers(0, vocabulary, order.prompt_tokens, np.int32)
            for _ in range(order.group_size):
                length = int(rng.integers(order.response_tokens // 4, 7 * order.response_tokens // 4, endpoint=True))
                response = rng.integers(0, vocabulary, max(1, length), np.int32)
                arriving.append(ScoreRequest(prompt_tokens=prompt, response_tokens=response))
        yield from sorted(arriving, key=_length)


def _length(request: ScoreRequest) -> int:
    return len(request.prompt_tokens) + len(request.response_tokens)


def _score_all(runner: Runner, samples: Sequence[ScoreRequest], batch_tokens: int) -> tuple[list[float], int]:
    """Return the samples' scores, and the number of batches that they took."""
    waiting = deque(ScoreLease(str(number), "", sample) for number, sample in enumerate(samples))
    held = dict[str, ScoreLease]()
    scores, batches = dict[str, float](), 0
    while waiting or held:
        while waiting and sum(_length(one.request) for one in held.values()) < BATCHES_AHEAD * batch_tokens:
            lease = waiting.popleft()
            held[lease.name] = lease
        batch = next_batch(list(held.values()), batch_tokens)
        for lease, found in zip(batch, runner.score([one.request for one in batch]), strict=True):
            scores[lease.name] = float(found[0])
            del held[lease.name]
        batches += 1
    return [scores[str(number)] for number in range(len(samples))], batches


def _with_head(model: Path) -> Path:
    """Return the directory of a reward model with the layers of `model`."""
    from safetensors.torch import save_file

    directory = model.with_name(f"{model.name}-reward")
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not (directory / file.name).exists():
            (directory / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    index = json.loads((model / "model.safetensors.index.json").read_text())
    generator = torch.Generator().manual_seed(0)
    head = torch.empty((1, config["hidden_size"])).normal_(0.0, checkpoint.SCALE, generator=generator)
    save_file({HEAD: head.bfloat16()}, directory / "model-head.safetensors", metadata={"format": "pt"})
    weight_map = {name: file for name, file in index["weight_map"].items() if not name.startswith("lm_head")}
    index = {**index, "weight_map": {**weight_map, HEAD: "model-head.safetensors"}}
    own = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "num_labels": 1}
    for name, content in (("model.safetensors.index.json", index), ("config.json", config | own)):
        (directory / name).unlink()
        (directory / name).write_text(json.dumps(content))
    return directory


def main() -> int:
    options = _parse()
    shape = shape_of(options.shape, options.layers)
    shape = msgspec.structs.replace(shape, head_dim=max(LEAST_HEAD_DIM, shape.head_dim))
    directory = checkpoint.folder(options.models, f"{options.shape}-scored", shape)
    checkpoint.write_isolated(shape, directory, options.device, options.timeout_s)
    order = {name: getattr(options, name) for name in Order.__struct_fields__ if hasattr(options, name)}
    order |= {"model": str(_with_head(directory))}
    found, failed = dict[str, Any](), dict[str, str]()
    for engine in options.engines:
        own = {"engine": engine, "options": options.options if engine == "vllm" else {}}
        outcome = isolated.run("benchmarks.scorers:score", {**order, **own}, 1, options.timeout_s)
        if "error" in outcome:
            failed[engine] = last_words(outcome)
            print(f"{engine}: {outcome['error']}", file=sys.stderr, flush=True)
        else:
            found[engine] = outcome["result"]
    print(json.dumps({"shape": options.shape, **_device(options), **_compared(found), "failed": failed}))
    return int(bool(failed))


def _device(options: argparse.Namespace) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    asked = ("dtype", "groups", "group_size", "prompt_tokens", "response_tokens", "batch_tokens", "options")
    return {"device": name, **{one: getattr(options, one) for one in asked}}


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the engines' results, with what they have in common in place of the scores."""
    scores = {engine: np.array(one.pop("scores")) for engine, one in found.items()}
    if scores.keys() < {"transformers", "vllm"}:
        return found
    plain, packed = scores["transformers"], scores["vllm"]
    return {
        **found,
        "ratio": round(found["vllm"]["samples_per_s"] / found["transformers"]["samples_per_s"], 2),
        "difference": round(float(np.abs(plain - packed).max() / plain.std()), 5),
    }


def _parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b" if on_gpu else "toy")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--engines", type=lambda text: text.split(","), default="transformers,vllm")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--groups", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--response-tokens", type=int, default=1024 if on_gpu else 32, help="the mean of all responses")
    parser.add_argument("--batch-tokens", type=int, default=16384 if on_gpu else 1024)
    parser.add_argument("--options", type=json.loads, default={}, help="scorers.engine.options of vLLM, as JSON")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one process")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
