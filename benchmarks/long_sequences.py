"""One long sequence over several GPUs, and its logprobs without all logits: memory and time.

    python -m benchmarks.long_sequences [--tokens 32768,131072] [--contexts 1,2,4] [--backend fsdp] [--shape qwen3-1.7b]
        [--logprob-tokens 32768] [--device cuda|cpu] --output DIR

Training steps of a single sequence with whole layers recomputed, its tokens shared by `layout.context` GPUs, for every
context that there are GPUs for; then `token_logprobs` against a plain log_softmax over all [T, V] logits, forward and
backward, each in a process of its own. A line of OUTPUT/results.jsonl a case; the last line is one JSON object.

T tokens, H model width, V vocabulary.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.throughput import checkpoint
from benchmarks.throughput.case import Case
from benchmarks.throughput.results import Line, Results, last_words
from benchmarks.throughput.shapes import shape_of
from headway.learner.backends.token_logprobs import token_logprobs
from headway.learner.config import ComputeConfig, LayoutConfig

TRAINING_KEYS = ("tokens_per_s", "tokens_per_s_per_device", "mfu", "peak_memory_gib", "reserved_memory_gib", "step_s")
REPEATS = 3
SCALE = 0.02
"""The standard deviation of the output embedding; hidden states have 1."""

Logprobs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden_TH, weight_VH, targets_T) -> [T] fp32."""


class HeadCase(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of random hidden states."""

    way: str
    """A key of `WAYS`."""
    tokens: int
    hidden: int
    vocabulary: int
    device: str


def plain(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Compute all logits at once in fp32."""
    logprobs_TV = (hidden_TH @ weight_VH.T).float().log_softmax(-1)
    return logprobs_TV.gather(1, targets_T[:, None])[:, 0]


def chunked(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Compute logprobs as the learner does."""
    return token_logprobs(hidden_TH, weight_VH, targets_T, 1.0)


WAYS: dict[str, Logprobs] = {"chunked": chunked, "plain": plain}


def measure_head(order: dict[str, Any]) -> dict[str, Any]:
    """Return median seconds of forward and backward, the memory on top of the inputs, and the sum of the outputs."""
    case = msgspec.convert(order["case"], HeadCase)
    generator = torch.Generator(case.device).manual_seed(0)
    hidden_TH = torch.randn(case.tokens, case.hidden, device=case.device, generator=generator).bfloat16()
    weight_VH = (
        torch.randn(case.vocabulary, case.hidden, device=case.device, generator=generator).mul_(SCALE).bfloat16()
    )
    targets_T = torch.randint(case.vocabulary, (case.tokens,), device=case.device, generator=generator)
    leaves = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    given_gib = _reset_peak_gib(case.device)
    took_s, sums = [], {}
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        logprobs_T = WAYS[case.way](hidden_TH, weight_VH, targets_T)
        gradients = torch.autograd.grad(logprobs_T.mean(), leaves)
        sums = {
            "logprobs_mean": float(logprobs_T.detach().mean()),
            "grad_norms": [float(one.norm()) for one in gradients],
        }
        took_s.append(time.perf_counter() - began)
        del logprobs_T, gradients
    return {
        "seconds": round(statistics.median(took_s[1:]), 4),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30 - given_gib, 2) if given_gib else None,
        **sums,
    }


def _reset_peak_gib(device: str) -> float | None:
    """Return the allocated memory, from which the peak now counts; None without a GPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def training_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield shorter sequences first, fewer GPUs first."""
    for tokens in options.tokens:
        for context in options.contexts:
            yield Case(
                name=options.backend,
                shape=options.shape,
                layers=options.layers,
                processes=context,
                layout=LayoutConfig(context=context),
                compute=ComputeConfig(recompute="full"),
                micro_batch_tokens=tokens,
                lengths=(tokens,),
                steps=REPEATS,
                warm_up_steps=1,
                device=options.device,
            )


def main() -> int:
    """Return the exit code: 1 if a case failed."""
    options = _parse()
    results = Results(options.output)
    lines = _train(results, options) | _compare_heads(results, options)
    figures = {name: line["result"] for name, line in lines.items() if "result" in line}
    failed = {name: last_words(line) for name, line in lines.items() if "error" in line}
    training = {
        name: {key: one[key] for key in TRAINING_KEYS} for name, one in figures.items() if name.startswith("training")
    }
    heads = {name: one for name, one in figures.items() if name not in training}
    print(json.dumps({"results": str(results.path), **training, **heads, "failed": failed}))
    return int(bool(failed))


def _train(results: Results, options: argparse.Namespace) -> dict[str, Line]:
    lines, shape = {}, shape_of(options.shape, options.layers)
    directory = checkpoint.folder(options.models, options.shape, shape)
    checkpoint.write_isolated(shape, directory, options.device, options.timeout_s)
    function = "benchmarks.throughput.measuring:measure_ordered"
    for case in training_cases(options):
        name = f"training {case.lengths[0]} tokens, context {case.layout.context}"
        _tell(name)
        lines[name] = results.measured(case, function, case.processes, options.timeout_s, model=str(directory))
        _tell(f"{name}: {lines[name].get('result', last_words(lines[name]))}")
    return lines


def _compare_heads(results: Results, options: argparse.Namespace) -> dict[str, Line]:
    lines, shape = {}, shape_of(options.shape)
    for way in WAYS:
        name, tokens = f"logprobs {way}", options.logprob_tokens
        case = HeadCase(way=way, tokens=tokens, hidden=shape.hidden, vocabulary=shape.vocabulary, device=options.device)
        lines[name] = results.measured(case, "benchmarks.long_sequences:measure_head", 1, options.timeout_s)
        _tell(f"{name}: {lines[name].get('result', last_words(lines[name]))}")
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default="32768,131072", metavar="N,...")
    parser.add_argument("--contexts", type=_numbers, metavar="N,...", help="default: 1, 2 and 4, as there are GPUs")
    parser.add_argument("--backend", default="fsdp", choices=("fsdp", "megatron"))
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--logprob-tokens", type=int, default=32768)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one case")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.contexts is None:
        count = torch.cuda.device_count() if options.device == "cuda" else 1
        options.contexts = [context for context in (1, 2, 4) if context <= max(count, 1)]
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
