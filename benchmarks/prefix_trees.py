"""The learner alone, with and without prefix trees: seconds of a step against how much a group's samples share.

    python -m benchmarks.prefix_trees [--shape smollm2-135m] [--groups 1,8,16] [--prompts 64,1024,8192]
        [--responses 256] [--samples 128] [--budget 65536] [--compile] [--settings never,auto,always]
        [--seconds 300] [--device cuda|cpu]

A step has the backend's work under GRPO: proximal logprobs of all samples, then an update. Responses have lengths
around --responses (lognormal, at most four times as long) and share nothing, so trees save prompts alone. Each case is
packed by `pack_units` under each value of `learner.prefix_sharing`. `tokens` are those of all samples, `computed` those
that went through the layers. `mfu` is of the update alone: the model's own operations for all samples, each with a
prompt of its own, forward and backward, against the device's peak. Sharing can thus bring it above 1. The last line is
one JSON object; each case's figures are on standard error as soon as it ends.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.throughput import checkpoint
from benchmarks.throughput.shapes import Shape, peak_flops, shape_of, step_flops
from learner.backends import open_backend
from learner.backends.base import Backend, TokenLoss
from learner.config import ComputeConfig, ModelConfig, OptimizerConfig
from learner.models.model import load_config
from learner.models.shape import shape_of as model_shape_of
from learner.rows.batch import PackedBatch
from learner.rows.clusters import PrefixSharing
from learner.rows.cost import CostModel
from learner.rows.packing import PackableSequence
from learner.rows.units import pack_units

SHARINGS: tuple[PrefixSharing, ...] = ("never", "auto", "always")
WARM_UPS = 2
SPREAD = 0.5
"""The standard deviation of the logarithm of a response's length."""


def samples(
    count: int, group: int, prompt: int, response: int, vocabulary: int, seed: int = 0
) -> Iterator[PackableSequence]:
    """Yield whole groups, `count` samples or as few more as it takes."""
    rng = np.random.default_rng(seed)
    for _ in range(-(-count // group)):
        beginning = rng.integers(0, vocabulary, prompt)
        for length in (response * rng.lognormal(0, SPREAD, group)).clip(1, 4 * response).astype(int):
            ones = np.ones(length, np.float32)
            yield PackableSequence(
                token_ids=np.concatenate([beginning, rng.integers(0, vocabulary, length)]).astype(np.int32),
                prompt_length=prompt,
                loss_mask=np.ones(length, np.uint8),
                behavior_logprobs=-ones,
                lags=np.zeros(length, np.int64),
                advantages=np.float32(rng.normal()) * ones,
            )


def measure(
    backend: Backend, plans: dict[PrefixSharing, list[PackedBatch]], device: str, repeats: int
) -> dict[str, dict[str, Any]]:
    """Return the median duration of a step of each plan, packing left out, and its largest memory.

    The plans take turns, so that a busy machine slows all of them.
    """
    took_s: dict[str, list[float]] = {name: [] for name in plans}
    update_s: dict[str, list[float]] = {name: [] for name in plans}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(WARM_UPS + repeats):
        for name, batches in plans.items():
            _reset_peak(device)
            began = time.perf_counter()
            proximal = backend.logprobs(batches, 1.0)
            _wait(device)
            updated = time.perf_counter()
            _, grad_norm, _ = backend.step(batches, _loss(batches, proximal), 1.0, 1e-6)
            _wait(device)
            took_s[name].append(time.perf_counter() - began)
            update_s[name].append(time.perf_counter() - updated)
            found[name] = {
                "computed": sum(batch.num_positions for batch in batches),
                "micro_batches": len(batches),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
                "grad_norm": grad_norm,
            }
    tokens = sum(batch.num_tokens for batch in next(iter(plans.values())))
    for setting, figures in found.items():
        step_s = statistics.median(took_s[setting][WARM_UPS:])
        figures |= {
            "step_s": round(step_s, 4),
            "update_s": round(statistics.median(update_s[setting][WARM_UPS:]), 4),
            "tokens_per_s": round(tokens / step_s),
            "tokens": tokens,
        }
    return found


def _loss(batches: list[PackedBatch], proximal: list[torch.Tensor]) -> TokenLoss:
    trained = sum(float(batch.loss_mask_T.sum()) for batch in batches)

    def loss(index: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        batch, ratio_T = batches[index], (current_T - proximal[index]).exp()
        return -(batch.loss_mask_T * batch.advantages_T * ratio_T).sum() / trained, {}

    return loss


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured_case(
    backend: Backend, shape: Shape, cost: CostModel, group: int, prompt: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one group size and prompt under every setting."""
    given = list(samples(options.samples, group, prompt, options.responses, shape.vocabulary))
    plans: dict[PrefixSharing, list[PackedBatch]] = {}
    pack_s = {}
    for prefix_sharing in options.settings:
        began = time.perf_counter()
        rows = pack_units(
            [[one] for one in given],
            replica=0,
            replicas=1,
            micro_batch_tokens=options.budget,
            cost=cost,
            prefix_sharing=prefix_sharing,
        )
        pack_s[prefix_sharing] = round(time.perf_counter() - began, 4)
        plans[prefix_sharing] = [row.batch for row in rows]
    measured = measure(backend, plans, options.device, options.repeats)
    flops = step_flops(shape, [len(one.token_ids) for one in given]).total
    peak = peak_flops(torch.cuda.get_device_name()) if options.device == "cuda" else None
    found: dict[str, Any] = {"group": group, "prompt": prompt}
    for prefix_sharing in options.settings:
        mfu = round(flops / measured[prefix_sharing]["update_s"] / peak, 3) if peak else None
        found[prefix_sharing] = {**measured[prefix_sharing], "mfu": mfu, "pack_s": pack_s[prefix_sharing]}
    for prefix_sharing in options.settings[1:]:
        took_s = found[options.settings[0]]["step_s"]
        found[f"times_faster_{prefix_sharing}"] = round(took_s / found[prefix_sharing]["step_s"], 3)
    return found


def main() -> None:
    """Measure all cases, as the command line says."""
    options, began = _parse(), time.perf_counter()
    shape = shape_of(options.shape, options.layers)
    directory = checkpoint.folder(options.models, options.shape, shape)
    checkpoint.write_isolated(shape, directory, options.device, 300.0)
    model = ModelConfig(path=str(directory), dtype="bfloat16" if options.device == "cuda" else "float32")
    compute = ComputeConfig(compile=options.compile, recompute=options.recompute)
    backend = open_backend("fsdp", model, OptimizerConfig(), device=options.device, compute=compute)
    cost = CostModel.of_model(model_shape_of(load_config(model)), options.device)
    cases = []
    for group, prompt in product(options.groups, options.prompts):
        if time.perf_counter() - began > options.seconds:
            break
        cases.append(measured_case(backend, shape, cost, group, prompt, options))
        print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(json.dumps({"device_name": device, "torch": torch.__version__, "options": given, "cases": cases}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--groups", type=_numbers, default="1,8,16", metavar="N,...")
    parser.add_argument("--prompts", type=_numbers, default="64,1024,8192", metavar="N,...")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--budget", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case starts later than this")
    parser.add_argument(
        "--settings",
        type=_names,
        default=SHARINGS,
        metavar="NAME,...",
        help="the first is what the others are compared with",
    )
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    return parser.parse_args()


def _names(text: str) -> list[PrefixSharing]:
    return [name for name in SHARINGS if name in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
