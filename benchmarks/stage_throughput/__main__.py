"""python -m benchmarks.stage_throughput --task sft|dpo [--shape qwen3-1.7b] [--layers N] [--records 64]
    [--median-tokens 512] [--longest-tokens 4096] [--micro-batch-tokens 16384] [--steps 8] [--device cuda|cpu]
    [--cases headway,headway-compiled,...] --output DIR

Tokens a second of a supervised stage, ours and TRL's trainer's, over the same file; trl must be installed beside ours.
Every case runs in a process of its own; the last line is one JSON object, with each case of ours over the fastest of
TRL's.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.throughput import checkpoint, isolated
from benchmarks.throughput.shapes import SHAPES, shape_of

from . import data
from .order import Order

CASES = {
    "sft": ("headway", "headway-compiled", "trl-packed-sdpa", "trl-packed-varlen", "trl-packed-varlen-compiled"),
    "dpo": ("headway", "headway-compiled", "trl-padded-2", "trl-padded-4", "trl-padded-8"),
}
WARM_UP_STEPS = 3


def main() -> int:
    """Return the exit code: 1 if a case failed."""
    options = _parse()
    shape = shape_of(options.shape, options.layers)
    model = checkpoint.folder(options.models, options.shape, shape)
    checkpoint.write_isolated(shape, model, options.device, options.timeout_s)
    file = options.output / f"{options.task}.jsonl"
    count = options.records * (options.steps + WARM_UP_STEPS)
    mean = data.write(file, options.task, count, options.median_tokens, options.longest_tokens)
    found = {name: _measured(name, mean, model, file, options) for name in options.cases or CASES[options.task]}
    print(json.dumps({"task": options.task, "shape": options.shape, "cases": found, **_ratios(found)}))
    return int(any("error" in one for one in found.values()))


def _measured(name: str, mean: float, model: Path, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    order = Order(
        name=name,
        task=options.task,
        model=str(model),
        data=str(file.absolute()),
        records_per_step=options.records,
        longest_tokens=options.longest_tokens,
        mean_tokens=mean,
        micro_batch_tokens=options.micro_batch_tokens,
        steps=options.steps,
        warm_up_steps=WARM_UP_STEPS,
        device=options.device,
    )
    module = "ours" if name.startswith("headway") else "of_trl"
    function = f"{__package__}.{module}:measure_ordered"
    outcome = isolated.run(function, msgspec.to_builtins(order), 1, options.timeout_s)
    line = outcome.get("result") or {"error": outcome["error"].strip().splitlines()[-1]}
    with (options.output / "results.jsonl").open("a") as results:
        results.write(json.dumps({"order": msgspec.to_builtins(order), **line}) + "\n")
    print(f"{name}: {json.dumps(line)}", file=sys.stderr, flush=True)
    return line


def _ratios(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    speeds = {name: one["tokens_per_s"] for name, one in found.items() if "tokens_per_s" in one}
    theirs = {name: speed for name, speed in speeds.items() if name.startswith("trl")}
    if not theirs:
        return {}
    best = max(theirs, key=lambda name: theirs[name])
    return {
        "best_of_trl": best,
        "over_best_of_trl": {n: round(s / theirs[best], 3) for n, s in speeds.items() if n not in theirs},
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stage_throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=tuple(CASES), required=True)
    parser.add_argument("--cases", type=lambda text: text.split(","), metavar="NAME,...", help="default: all")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--records", type=int, default=64, help="conversations or pairs in a step")
    parser.add_argument("--median-tokens", type=int, default=512)
    parser.add_argument("--longest-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one case")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
