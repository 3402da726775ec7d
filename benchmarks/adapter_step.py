"""Steps of an adapter: both backends, and a base in 16, 8 and 4 bits, with a dense model and one with experts.

    python -m benchmarks.adapter_step [--device cuda|cpu] [--width 2048] [--layers 16] [--tokens 8192] [--rank 16]
        [--steps 5] [--limit-s 200]

Random Qwen3 in bfloat16, whose kernels are launched one by one. Of each case: seconds until it is ready (`ready_s`),
the loss and the gradients' norm of each step, the median milliseconds of the later ones (`step_ms`), and on a GPU the
GiB that are held between steps (`gib`) and at most (`peak_gib`). `off` is the mean difference of its logprobs after
all steps from those of fsdp with a base in 16 bits. Each backend has a process of its own. nf4 needs bitsandbytes:
without it that case says so. What the process holds before a case (`left_gib`) is not in these. What is known goes to
the standard error at once; the last line is one JSON object.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from headway.broker.errors import HeadwayError
from headway.learner.backends import open_backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, pack
from headway.learner.config import AdapterConfig, ComputeConfig, ModelConfig, OptimizerConfig, RandomModelConfig
from headway.learner.models.model import load_tokenizer

ALPHABET = "".join(chr(0x4E00 + index) for index in range(4000))
BASES = {"fsdp": ("none", "int8", "nf4"), "megatron": ("none",)}
GIB = 2**30
LAUNCHED = ComputeConfig(cuda_graphs="never")
LENGTH = 256
"""Tokens of a sequence."""


def shape_of(name: str, options: argparse.Namespace) -> PretrainedConfig:
    """Return the configuration of the dense model, or of one with experts of half the width and layers."""
    sizes: dict[str, Any] = {
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": options.width // 8,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": torch.bfloat16,
    }
    if name == "dense":
        return Qwen3Config(**sizes)
    width, layers = options.width // 2, max(1, options.layers // 2)
    sizes |= {"hidden_size": width, "head_dim": width // 8, "num_hidden_layers": layers}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": width // 2, "norm_topk_prob": True}
    return Qwen3MoeConfig(**sizes, **experts)


def write_model(name: str, options: argparse.Namespace) -> None:
    """Write a random model with a tokenizer."""
    directory = Path(options.models, name)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(shape_of(name, options), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    random = RandomModelConfig(architecture="qwen3", config={}, alphabet=ALPHABET)
    load_tokenizer(ModelConfig(random=random)).save_pretrained(directory)


def batches_of(options: argparse.Namespace) -> list[PackedBatch]:
    """Return rows of random sequences."""
    rng = np.random.default_rng(0)
    sequences = [
        PackableSequence(
            token_ids=rng.integers(0, len(ALPHABET), LENGTH).astype(np.int32),
            prompt_length=LENGTH // 4,
            loss_mask=np.ones(LENGTH - LENGTH // 4, np.uint8),
            behavior_logprobs=np.full(LENGTH - LENGTH // 4, -8.0, np.float32),
            lags=np.zeros(LENGTH - LENGTH // 4, np.int64),
            advantages=np.ones(LENGTH - LENGTH // 4, np.float32),
        )
        for _ in range(max(1, options.tokens // LENGTH))
    ]
    return pack(sequences, 0, 1, options.tokens)


def measured(backend_kind: str, name: str, base: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case, and leave its logprobs in a file."""
    on_gpu = options.device == "cuda"
    left = torch.cuda.memory_allocated() if on_gpu else 0  # what the case before has left
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    adapter = AdapterConfig(rank=options.rank, alpha=2.0 * options.rank, quantize_base=base)  # type: ignore[arg-type]
    model = ModelConfig(path=str(Path(options.models, name)), dtype="bfloat16", adapter=adapter)
    begun = time.perf_counter()
    backend = open_backend(backend_kind, model, OptimizerConfig(), device=options.device, seed=0, compute=LAUNCHED)
    result: dict[str, Any] = {"ready_s": round(time.perf_counter() - begun, 2)}
    batches, steps, seconds = batches_of(options), [], []

    def loss(index: int, logprobs_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return -(batches[index].loss_mask_T * logprobs_T).sum() / options.tokens, {}

    for _ in range(options.steps):
        begun = time.perf_counter()
        total, norm, _ = backend.step(batches, loss, 1.0, 1e-3)
        seconds.append(time.perf_counter() - begun)
        steps.append([round(total, 6), round(norm, 6)])
    result |= {"steps": steps, "step_ms": round(1e3 * statistics.median(seconds[1:]), 1)}
    if on_gpu:
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        result |= {"gib": round((held - left) / GIB, 2), "peak_gib": round((peak - left) / GIB, 2)}
        result["left_gib"] = round(left / GIB, 2)
    torch.save(torch.cat(backend.logprobs(batches, 1.0)).cpu(), Path(options.models, f"{backend_kind}-{name}-{base}"))
    return result


def one_backend(options: argparse.Namespace) -> None:
    """Measure the cases of one backend, and print each as a line."""
    for name in ("dense", "experts"):
        for base in BASES[options.child]:
            try:
                result = measured(options.child, name, base, options)
            except (HeadwayError, RuntimeError, ImportError) as error:
                result = {"error": f"{type(error).__name__}: {str(error)[-600:]}"}
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            line = json.dumps({"case": f"{options.child}-{name}-{base}", **result})
            print(line, flush=True)
            print(line, file=sys.stderr, flush=True)


def compared(cases: dict[str, Any], directory: Path) -> None:
    """Add to each case how far its logprobs are off."""
    for case, result in cases.items():
        name = case.split("-")[1]
        file, plain = directory / case, directory / f"fsdp-{name}-none"
        if file.exists() and plain.exists():
            result["off"] = round(float((torch.load(file) - torch.load(plain)).abs().mean()), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 128)
    parser.add_argument("--layers", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=200.0)
    parser.add_argument("--child", choices=tuple(BASES), help=argparse.SUPPRESS)
    parser.add_argument("--models", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        one_backend(options)
        return
    deadline = time.monotonic() + options.limit_s
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        options.models = directory
        for name in ("dense", "experts"):
            write_model(name, options)
        if on_gpu:
            torch.cuda.empty_cache()
        given = [f"--{key}={getattr(options, key)}" for key in ("device", "width", "layers", "tokens", "rank", "steps")]
        for kind in BASES:
            command = [sys.executable, "-m", "benchmarks.adapter_step", f"--child={kind}", f"--models={directory}"]
            cases |= _cases_of([*command, *given], deadline - time.monotonic())
        compared(cases, Path(directory))
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    print(json.dumps({**versions, "width": options.width, "layers": options.layers, "cases": cases}))


def _cases_of(command: list[str], limit_s: float) -> dict[str, Any]:
    """Return what a child process has measured until its end or the limit."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"case"')]
    return {line.pop("case"): line for line in lines}


if __name__ == "__main__":
    main()
