"""Seconds and GB/s from a published step to the first token of its version, in an engine that generates all the while.

    python -m benchmarks.weight_sync [--shape qwen3-30b-a3b] [--layers N] [--transport nccl|ipc|gloo]
        [--staging device|host] [--learner-gpus 1] [--engine-gpus 1] [--share] [--native] [--versions 5] --output DIR

One learner and one engine, each on GPUs of its own, on the same ones with `--transport ipc` or `--share`, or on the
CPU with `--device cpu`. With `--share` NCCL is told that the two are on different hosts, and goes through sockets. A
learner of several GPUs has its weights in shards (FSDP2), an engine of several is tensor-parallel. `--native` then
does the same with vLLM's own transfer over NCCL. The first version is pulled and traces the engine's loader, the second
forms the group; the medians are of the later ones. Lines go to OUTPUT/results.jsonl; the last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks import command
from benchmarks.gpus import gpu_names, on_host
from benchmarks.models import SHAPES, shape_of
from benchmarks.processes import Group
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.engines import ENGINES

from . import Order

WARM_UP = 2
"""The number of versions that do not count."""
NATIVE_VERSIONS = 4
Lines = list[dict[str, Any]]


def measure(order: Order, options: argparse.Namespace) -> Lines:
    """Return one line for every version, with the reports of both ends."""
    are_shared = options.share or options.transport == "ipc"
    learner, engine = places(options.learner_gpus, options.engine_gpus, are_shared=are_shared)
    encoded = msgspec.json.encode(order).decode()
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.learner_gpus))
    with TemporaryDirectory() as directory, EmbeddedServer(Path(directory)) as server:
        given = (server.url, "weight-sync", encoded)
        words = {
            "learner": (*(ranks if options.learner_gpus > 1 else ()), *_module("learner"), *given),
            "engine": (*_module("engine"), *given),
        }
        sees = {"learner": {"CUDA_VISIBLE_DEVICES": learner}, "engine": {"CUDA_VISIBLE_DEVICES": engine}}
        sees["engine"] |= on_host("engine") if are_shared else {}
        _run(words, sees, options.output, options.limit_s)
    sent, taken = (_objects(options.output / f"{name}.log") for name in words)
    of_engine = {line["version"]: line for line in taken}
    return [{**line, **of_engine.get(line["version"], {})} for line in sent]


def native(order: Order, options: argparse.Namespace) -> Lines:
    """Return one line for every update by vLLM's own transfer; its trainer starts the engine."""
    learner, engine = places(1, options.engine_gpus, are_shared=False)
    words = {"native": (*_module("native"), msgspec.json.encode(order).decode())}
    sees = {"native": {"CUDA_VISIBLE_DEVICES": learner, "ENGINE_GPU": engine}}
    _run(words, sees, options.output, options.native_limit_s)
    return _objects(options.output / "native.log")


def places(learner: int, engine: int, *, are_shared: bool) -> tuple[str, str]:
    """Return the GPUs that each end sees, as CUDA_VISIBLE_DEVICES; the first ones are the learner's."""
    names = gpu_names(max(learner, engine) if are_shared else learner + engine)
    return ",".join(names[:learner]), ",".join(names[:engine] if are_shared else names[learner:])


def _run(
    words: Mapping[str, Sequence[str]], sees: Mapping[str, Mapping[str, str]], output: Path, limit_s: float
) -> None:
    """Run these commands of Python until all have ended or one has failed; their output goes to files."""
    running, end = dict[str, Group](), time.monotonic() + limit_s
    try:
        for name, arguments in words.items():
            with (output / f"{name}.log").open("w") as log:
                environment = {**os.environ, **sees[name]}
                running[name] = Group((sys.executable, *arguments), environment, output=log, words=log)
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < end:
            codes = [group.poll(0.2) for group in running.values()]
    finally:
        for group in running.values():
            group.end()


def _module(name: str) -> tuple[str, str]:
    return ("-m", f"benchmarks.weight_sync.{name}")


def _objects(path: Path) -> Lines:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"')]
    return [line for line in lines if "version" in line]


def seconds(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds from the step on; only versions that were broadcast and swapped in have all of them."""
    if "first_new_token" not in line or not line.get("received", True):
        return {}
    moments = ("received", "swapped", "verified", "announced", "first_new_token")
    found = {name: line[name] - line["began"] for name in moments if name in line}
    return found | {"engine_without_tokens": line["first_new_token"] - line["last_old_token"]}


def medians(lines: Lines, warm_up: int, nbytes: int) -> dict[str, float]:
    """Return the median of every key, over the versions after the warm-up, and the speed."""
    counted = [found for line in lines[warm_up:] if (found := seconds(line))]
    if not counted:
        return {}
    found = {key: round(statistics.median(line[key] for line in counted), 4) for key in counted[0]}
    return found | {"gb_per_s": round(nbytes / found["first_new_token"] / 1e9, 2)}


def main() -> int:
    """Return the exit code: 1 if no version was measured."""
    options = _parse()
    options.output.mkdir(parents=True, exist_ok=True)
    shape = shape_of(options.shape, options.layers)
    model = options.output / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape.config()))  # engines start with random weights
    order = _order(options, model)
    lines = measure(order, options)
    nbytes = lines[0]["bytes"] if lines else 0
    told = {name: value for name, value in vars(options).items() if name != "output"}
    found: dict[str, Any] = {"options": told, "bytes": nbytes}
    found |= {
        "ours": medians(lines, WARM_UP, nbytes),
        "failed": {x["version"]: x["failed"] for x in lines if x["failed"]},
    }
    if options.native:
        theirs = native(msgspec.structs.replace(order, versions=NATIVE_VERSIONS), options)
        found["native"] = medians(theirs, 1, nbytes)
        if found["native"] and found["ours"]:
            found["times_faster"] = round(found["native"]["first_new_token"] / found["ours"]["first_new_token"], 2)
    with (options.output / "results.jsonl").open("a") as results:
        results.writelines(json.dumps(line) + "\n" for line in (*lines, found))
    return command.finish(found, not found["ours"])


def _order(options: argparse.Namespace, model: Path) -> Order:
    # The engine reports tokens one by one, because their times are measured.
    engine: dict[str, Any] = {} if options.engine == "embedded" else {"stream_interval": 1}
    abilities, is_cpu = ENGINES[options.engine].abilities, options.device == "cpu"
    engine |= {} if is_cpu else {abilities.memory_option: options.gpu_memory}
    engine |= {abilities.gpu_options[0]: options.engine_gpus} if options.engine_gpus > 1 else {}
    same = ("device", "transport", "staging", "versions", "engine", "requests", "new_tokens", "kv_policy", "timeout_s")
    return Order(
        model=str(model),
        dtype="float32" if is_cpu else "bfloat16",
        options=engine | json.loads(options.options),
        **{name: getattr(options, name) for name in same},
    )


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "weight_sync")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--transport", choices=["nccl", "ipc", "gloo"], default="nccl")
    parser.add_argument("--staging", choices=["device", "host"], default="device")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--engine", choices=["vllm", "sglang", "embedded"], default="vllm")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    parser.add_argument("--learner-gpus", type=int, default=1, help="ranks, on a CPU too")
    parser.add_argument("--engine-gpus", type=int, default=1)
    parser.add_argument("--share", action="store_true", help="the engine has GPUs of the learner")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=1000)
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU that the engine takes")
    parser.add_argument("--kv-policy", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="deadline of a broadcast")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for ours")
    parser.add_argument("--native-limit-s", type=float, default=150.0, help="for vLLM's own")
    parser.add_argument("--native", action="store_true", help="vLLM's own transfer too")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
