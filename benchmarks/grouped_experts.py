"""A layer's experts in one grouped multiplication against a loop over them, forward and backward.

    python -m benchmarks.grouped_experts [--tokens 4096,8192,16384,32768] [--repeats 10] [--device cuda|cpu]
        --output DIR

The sizes are Qwen3-30B-A3B's: 128 experts of 2048 x 768, 8 a token. Routing is drawn without replacement, `balanced`
from equal weights, `skewed` from weights that fall as 1 / rank. Every case runs in a process of its own and is a line
of OUTPUT/results.jsonl; the last line is one JSON object.

S routed tokens (tokens * experts a token) sorted by expert, E experts, H model width, I width of an expert.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from benchmarks.throughput.results import Results, last_words
from benchmarks.throughput.shapes import peak_flops, shape_of

EXPONENTS = {"balanced": 0.0, "skewed": 1.0}
"""Weights of the experts are 1 / rank ** exponent."""

SCALE = 0.02
"""The standard deviation of the weights; hidden states have 1."""

FUNCTION = "benchmarks.grouped_experts:compare"

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
"""(hidden_SH, up_EHI2, down_EIH, tokens of each expert) -> [S, H]."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a figure depends on."""

    tokens: int
    routing: str
    shape: str
    device: str
    repeats: int


def routed_counts(tokens: int, experts: int, experts_per_token: int, exponent: float) -> list[int]:
    """Return the number of tokens of each expert: Gumbel noise on log weights draws without replacement."""
    generator = torch.Generator().manual_seed(0)
    log_weights_E = -exponent * torch.arange(1, experts + 1).log()
    noise_TE = -torch.rand(tokens, experts, generator=generator).log().neg().log()
    chosen = (log_weights_E + noise_TE).topk(experts_per_token).indices
    counts: list[int] = chosen.flatten().bincount(minlength=experts).tolist()
    return counts


def grouped(hidden_SH: torch.Tensor, up_EHI2: torch.Tensor, down_EIH: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply with all experts in one call."""
    ends_E = torch.tensor(counts, device=hidden_SH.device).cumsum(0).int()
    gate_SI, up_SI = F.grouped_mm(hidden_SH, up_EHI2, offs=ends_E).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate_SI) * up_SI, down_EIH, offs=ends_E)


def looped(hidden_SH: torch.Tensor, up_EHI2: torch.Tensor, down_EIH: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply with one expert after the other, those without tokens included: their gradients are zeros."""
    outputs = []
    for hidden_CH, up_HI2, down_IH in zip(torch.split(hidden_SH, counts), up_EHI2, down_EIH, strict=True):
        gate_CI, up_CI = (hidden_CH @ up_HI2).chunk(2, dim=-1)
        outputs.append((F.silu(gate_CI) * up_CI) @ down_IH)
    return torch.cat(outputs)


def compare(order: dict[str, Any]) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s of both ways, the loop's time over the grouped call's, and their difference."""
    case = msgspec.convert(order["case"], Case)
    shape = shape_of(case.shape)
    counts = routed_counts(case.tokens, shape.experts, shape.experts_per_token, EXPONENTS[case.routing])
    torch.manual_seed(0)
    inputs = (
        _random(case.device, sum(counts), shape.hidden) / SCALE,
        _random(case.device, shape.experts, 2 * shape.expert_intermediate, shape.hidden).transpose(1, 2),
        _random(case.device, shape.experts, shape.hidden, shape.expert_intermediate).transpose(1, 2),
    )
    flops = 3 * 6 * sum(counts) * shape.hidden * shape.expert_intermediate
    peak = peak_flops(torch.cuda.get_device_name()) if case.device == "cuda" else None
    ways: dict[str, Experts] = {"grouped": grouped, "looped": looped}
    took_s = {name: _median_s(way, inputs, counts, case) for name, way in ways.items()}
    return {
        **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in took_s.items()},
        **{f"{name}_tflops": round(flops / seconds / 1e12, 3) for name, seconds in took_s.items()},
        "grouped_mfu": round(flops / took_s["grouped"] / peak, 4) if peak else None,
        "looped_over_grouped": round(took_s["looped"] / took_s["grouped"], 2),
        "tokens_of_fullest_expert": max(counts),
        "tokens_of_emptiest_expert": min(counts),
        "largest_difference": _largest_difference(inputs, counts),
    }


def _random(device: str, *size: int) -> torch.Tensor:
    return (SCALE * torch.randn(size, device=device)).bfloat16()


def _gradients(way: Experts, inputs: tuple[torch.Tensor, ...], counts: list[int]) -> tuple[torch.Tensor, ...]:
    """Return gradients by all inputs; the hidden states serve as the output's gradient."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    hidden_SH, up_EHI2, down_EIH = leaves
    return torch.autograd.grad(way(hidden_SH, up_EHI2, down_EIH, counts), leaves, inputs[0])


def _largest_difference(inputs: tuple[torch.Tensor, ...], counts: list[int]) -> float:
    """Return the largest difference between the gradients of both, relative to the largest gradient."""
    pairs = zip(_gradients(grouped, inputs, counts), _gradients(looped, inputs, counts), strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _median_s(way: Experts, inputs: tuple[torch.Tensor, ...], counts: list[int], case: Case) -> float:
    """Return the median seconds of forward and backward, after two rounds that do not count."""
    took_s = []
    for _ in range(case.repeats + 2):
        _finish(case.device)
        began = time.perf_counter()
        _gradients(way, inputs, counts)
        _finish(case.device)
        took_s.append(time.perf_counter() - began)
    return statistics.median(took_s[2:])


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    """Return the exit code: 1 if a case failed."""
    options = _parse()
    results, summary, failed = Results(options.output), dict[str, Any](), dict[str, str]()
    for tokens in options.tokens:
        for routing in EXPONENTS:
            case = Case(
                tokens=tokens, routing=routing, shape=options.shape, device=options.device, repeats=options.repeats
            )
            name, line = f"{tokens} {routing}", results.measured(case, FUNCTION, 1, options.timeout_s)
            print(f"{name}: {line.get('result', line.get('error'))}", file=sys.stderr, flush=True)
            summary |= {name: line["result"]} if "result" in line else {}
            failed |= {name: last_words(line)} if "error" in line else {}
    print(json.dumps({"results": str(results.path), "cases": summary, "failed": failed}))
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default="4096,8192,16384,32768", metavar="N,...")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=("qwen3-30b-a3b", "toy-moe"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one case")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
