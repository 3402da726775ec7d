"""python -m benchmarks.small_models [--shape smollm2-135m] [--device cuda|cpu] [--limit-s 420] [--parts today,...]
    [--ways never,auto,...]

The learner's step of a small model on one GPU. The parts, in this order: `today` (the backend, eager and compiled, by
row size), `bare` (one module without sharding, replayed as CUDA graphs or not), `graphs` (the backend's passes launched
and replayed, and how far their updates are apart), `attention`, `optimizer`, `whole` (the whole model compiled as
one). A part that does not begin within the limit is left out. Progress goes to standard error; the last line is one
JSON object.
"""

import argparse
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpus import NO_MULTICAST
from benchmarks.throughput import checkpoint
from benchmarks.throughput.shapes import shape_of
from headway.learner.config import ComputeConfig, LearnerConfig, ModelConfig

from . import bare, graphs, kernels, today
from .rows import StepWork

PARTS = ("today", "bare", "graphs", "attention", "optimizer", "whole")
MODES = ("default", "reduce-overhead")

WORKS = tuple(
    StepWork(samples=samples, budget=budget, sharing=sharing)
    for samples, budget in ((128, 4096), (128, 16384), (512, 16384), (512, 65536))
    for sharing in ("never", "auto")
)
SHORT = StepWork(samples=128, budget=16384, sharing="auto")
PLAIN = StepWork(samples=128, budget=16384, sharing="never")
TREE = StepWork(samples=128, budget=16384, sharing="always")
LARGE = StepWork(samples=512, budget=65536, sharing="auto")


def main() -> None:
    """Measure all parts, as the command line says."""
    options = _parse()
    os.environ |= NO_MULTICAST
    torch.set_num_threads(LearnerConfig().threads)  # as the learner does; more wait for each other on a busy host
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("headway.learner").setLevel(logging.DEBUG)  # why kernels are launched, not replayed
    began = time.monotonic()
    shape = shape_of(options.shape)
    directory = checkpoint.folder(None, options.shape, shape)
    checkpoint.write_isolated(shape, directory, options.device, 300.0)
    model = ModelConfig(path=str(directory), dtype="bfloat16" if options.device == "cuda" else "float32")
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "shape": options.shape,
        "cudnn": _cudnn(),
    }
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    for name, call in _cases(model, options.device, shape.vocabulary, options.parts, options.ways):
        if time.monotonic() - began > options.limit_s:
            found[name] = "left out: no time"
            continue
        started = time.monotonic()
        try:
            found[name] = call()
        except Exception:  # noqa: BLE001  # the other parts are still worth having
            found[name] = traceback.format_exc()[-1500:]
        print(f"{name} {time.monotonic() - started:.1f} s: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    print(json.dumps(found))


def _cases(
    model: ModelConfig, device: str, vocabulary: int, parts: tuple[str, ...], ways: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    compiled = [False, True] if device == "cuda" else [False]
    for compiles in compiled if "today" in parts else ():
        compute = ComputeConfig(compile=compiles, cuda_graphs="never")
        yield (
            f"today, {_words(compiles)}",
            partial(today.measured, model, device, compute, WORKS, vocabulary, detail=SHORT),
        )
    for compiles in compiled if "bare" in parts else ():
        step = bare.BareStep(model, ComputeConfig(compile=compiles), device)
        for work in (SHORT, PLAIN, LARGE):
            row = step.row(work, vocabulary)
            yield f"bare, {_words(compiles)}, {work.name}", partial(bare.measured, step, row)
    if "attention" in parts and device == "cuda":
        for name, shape in kernels.SHAPES.items():
            yield f"attention, {name}", partial(kernels.measured, shape)
    if "optimizer" in parts:
        yield "optimizer", lambda: bare.optimizers(bare.BareStep(model, ComputeConfig(), device))
    if "graphs" in parts:
        works = (PLAIN, TREE, replace(TREE, samples=32))
        yield "graphs", partial(graphs.measured, model, device, works, vocabulary, ways)
    for mode in MODES if "whole" in parts and device == "cuda" else ():
        whole = bare.BareStep(model, ComputeConfig(), device, mode=mode)
        for work in (SHORT, PLAIN):
            yield f"whole, {mode}, {work.name}", partial(bare.measured, whole, whole.row(work, vocabulary))


def _cudnn() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _words(compiles: bool) -> str:
    return "compiled" if compiles else "eager"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--parts", type=lambda text: tuple(text.split(",")), default=PARTS)
    parser.add_argument("--ways", type=lambda text: tuple(text.split(",")), default=graphs.WAYS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
