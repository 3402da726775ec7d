"""The model and the prompts of both sides."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.throughput import checkpoint
from benchmarks.throughput.shapes import shape_of
from headway.rollout_workers.config import EngineConfig

HEAD_DIM = 32
"""The smallest head for which vLLM has attention on a CPU."""
PROMPT_TOKENS = (32, 128)
ALPHABET_TOKENS = 40
"""Prompts consist of this many tokens of the tokenizer, so that they have a text."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the model, the generation and the measurement."""

    shape: str
    engine: EngineConfig
    max_new_tokens: int
    mean_tokens: int
    group_size: int
    warm_up_s: float
    seconds: float
    kv_policy: str
    """The worker's policy for the caches of running requests at an update."""
    model_dir: str = ""


def write_model(workload: Workload, models: Path | None, device: str, timeout_s: float) -> Path:
    """Write a directory of random weights, whose config.json names the tokens that end a response."""
    shape = shape_of(workload.shape)
    shape = msgspec.structs.replace(shape, head_dim=max(shape.head_dim, HEAD_DIM))
    directory = checkpoint.folder(models, f"ending-{workload.shape}", shape)
    checkpoint.write_isolated(shape, directory, device, timeout_s)
    path = directory / "config.json"
    first, count = shape.vocabulary // 2, max(1, shape.vocabulary // workload.mean_tokens)
    config = json.loads(path.read_text()) | {"eos_token_id": list(range(first, first + count))}
    path.write_text(json.dumps(config, indent=2))
    return directory


def read_weights(directory: Path, dtype: str) -> list[tuple[str, torch.Tensor]]:
    """Return the weights by Hugging Face name, as a learner yields them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def prompts() -> Iterator[list[int]]:
    """Yield the same prompts every time, for ever."""
    drawn = random.Random(0)
    while True:
        yield [drawn.randrange(2, ALPHABET_TOKENS) for _ in range(drawn.randint(*PROMPT_TOKENS))]


def rate(samples: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return rates between the first and the last of (time in s, tokens until then, CPU seconds until then)."""
    (began, tokens, cpu), (ended, last_tokens, last_cpu) = samples[0], samples[-1]
    count, took = last_tokens - tokens, ended - began
    return {
        "tokens_per_s": round(count / took, 1),
        "cpu_us_per_token": round(1e6 * (last_cpu - cpu) / count, 2) if count else None,
        "cpu_share": round((last_cpu - cpu) / took, 3),
        "seconds": round(took, 2),
    }
