"""Seconds and GB/s from a published step to the first token of its version, in an engine that generates all the while.

    python -m benchmarks.weight_sync [--shape qwen3-30b-a3b] [--layers N] [--transport nccl|ipc|gloo]
        [--staging device|host] [--learner-gpus 1] [--engine-gpus 1] [--share] [--native] [--versions 5] --output DIR

One learner and one engine, each on GPUs of its own, on the same ones with `--transport ipc` or `--share`, or on the
CPU with `--device cpu`. With `--share` NCCL is told that the two are on different hosts, and goes through sockets. A
learner of several GPUs has its weights in shards (FSDP2), an engine of several is tensor-parallel. `--native` then
does the same with the engine's own transfer: vLLM's over NCCL (two GPUs); SGLang's over its process group, or, where
both share a GPU, of the trainer's memory (on a CPU both). The first version is pulled and traces the engine's loader,
the second forms the group; the medians are of the later ones. Lines go to OUTPUT/results.jsonl; the last line is one
JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpus import gpu_names, on_host
from benchmarks.throughput.shapes import SHAPES, shape_of
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.engines import ENGINES

from .order import Order
from .tensors import write_config

WARM_UP = 2
"""The number of versions that do not count."""
NATIVE = {
    "native": "times_faster",
    "native_distributed": "times_faster_than_distributed",
    "native_tensor": "times_faster_than_tensor",
}
"""The engines' own transfers, and the names of the ratios of their seconds to ours."""


class Places(NamedTuple):
    """The GPUs that each end sees, as CUDA_VISIBLE_DEVICES."""

    ranks: int
    """The number of the learner's ranks."""
    learner: str
    engine: str
    host_of_engine: dict[str, str]
    """Variables of the engine's environment."""

    @classmethod
    def of(cls, learner: int, engine: int, *, are_shared: bool) -> "Places":
        """Return the places; the first GPUs are the learner's."""
        names = gpu_names(max(learner, engine) if are_shared else learner + engine)
        engines = names[:engine] if are_shared else names[learner:]
        host = on_host("engine") if are_shared else {}
        return cls(learner, ",".join(names[:learner]), ",".join(engines), host)


def measure(order: Order, output: Path, places: Places, limit_s: float) -> list[dict[str, Any]]:
    """Return one line for every version, with the reports of both ends."""
    encoded = msgspec.json.encode(order).decode()
    with TemporaryDirectory() as directory, EmbeddedServer(Path(directory)) as server:
        arguments = [server.url, "weight-sync", encoded]
        processes = [
            _start("learner", [*_ranks(places.ranks), *_module("learner"), *arguments], output, places.learner),
            _start("engine", [*_module("engine"), *arguments], output, places.engine, **places.host_of_engine),
        ]
        end = time.monotonic() + limit_s
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                _end(process)
    sent, taken = _lines(output / "learner.log"), _lines(output / "engine.log")
    return [{**one, **taken.get(version, {})} for version, one in sent.items()]


def _start(name: str, arguments: list[str], output: Path, gpus: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with these arguments; it sees these GPUs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, **environment}
    command = [sys.executable, *arguments]
    with (output / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _module(name: str) -> list[str]:
    return ["-m", f"benchmarks.weight_sync.{name}"]


def _ranks(count: int) -> list[str]:
    return [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with its children: one that stays would keep the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(path: Path) -> dict[int, dict[str, Any]]:
    return {line["version"]: line for line in _objects(path)}


def _objects(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"')]
    return [line for line in lines if "version" in line]


def seconds(line: dict[str, Any]) -> dict[str, float]:
    """Return the seconds from the step on; only versions that were broadcast and swapped in have all of them."""
    if "first_new_token" not in line or not line.get("received"):
        return {}
    began = line["began"]
    return {
        "received": line["received"] - began,
        "swap_began": line["swap"][0] - began,
        "swapped": line["swap"][1] - began,
        "last_old_token": line["last_old_token"] - began,
        "first_new_token": line["first_new_token"] - began,
        "verified": line["verified"] - began,
        "announced": line["announced"] - began,
        "engine_without_tokens": line["first_new_token"] - line["last_old_token"],
        "longest_pause": line["longest_pause_s"],
    }


def peers(order: Order, output: Path, places: Places, limit_s: float) -> dict[str, Any]:
    """Return the medians of the engine's own transfers of the same tensors, each without its first version."""
    module, ways = ("native_sglang", ["distributed", "tensor"]) if order.engine == "sglang" else ("native", [""])
    lines = native(module, order, output, places, limit_s)
    of_each = {way: [native_seconds(line) for line in lines if line.get("way", "") == way][1:] for way in ways}
    return {"_".join(["native", *filter(None, [way])]): medians(of_each[way]) for way in ways}


def native(module: str, order: Order, output: Path, places: Places, limit_s: float) -> list[dict[str, Any]]:
    """Run a trainer and an engine with a transfer that is not ours, and return a line for every update."""
    arguments = [*_module(module), msgspec.json.encode(order).decode()]
    process = _start("native", arguments, output, places.learner, ENGINE_GPU=places.engine)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"the engine's own transfer had not ended after {limit_s:.0f} s", file=sys.stderr)
    finally:
        _end(process)
    return _objects(output / "native.log")


def native_seconds(line: dict[str, Any]) -> dict[str, float]:
    """Return the same moments of a transfer that is not ours."""
    return {
        "first_new_token": line["first_new_token"] - line["began"],
        "engine_without_tokens": line["first_new_token"] - line["last_old_token"],
    }


def medians(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every key, over the versions after the warm-up."""
    counted = [line for line in lines if line]
    return {key: round(statistics.median(line[key] for line in counted), 4) for key in counted[0]} if counted else {}


def main() -> None:
    arguments = parse()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    shape = shape_of(arguments.shape, arguments.layers)
    is_cpu = arguments.device == "cpu"
    # The engine reports tokens one by one, because their times are measured.
    options: dict[str, Any] = {} if arguments.engine == "embedded" else {"stream_interval": 1}
    abilities = ENGINES[arguments.engine].abilities
    options |= {} if is_cpu else {abilities.memory_option: arguments.gpu_memory}
    options |= {abilities.gpu_options[0]: arguments.engine_gpus} if arguments.engine_gpus > 1 else {}
    options |= json.loads(arguments.options)
    are_shared = arguments.share or arguments.transport == "ipc"
    places = Places.of(arguments.learner_gpus, arguments.engine_gpus, are_shared=are_shared)
    order = Order(
        model=str(write_config(shape, output / "model")),
        dtype="float32" if is_cpu else "bfloat16",
        device=arguments.device,
        transport=arguments.transport,
        staging=arguments.staging,
        bucket_bytes=arguments.bucket_mib << 20,
        timeout_s=arguments.timeout_s,
        versions=arguments.versions,
        engine=arguments.engine,
        requests=arguments.requests,
        new_tokens=arguments.new_tokens,
        kv_policy=arguments.kv_policy,
        options=options,
    )
    found: dict[str, Any] = {"shape": arguments.shape, "layers": shape.layers, "transport": order.transport}
    lines = measure(order, output, places, arguments.limit_s)
    of_each = [seconds(line) for line in lines]
    found |= {
        "staging": order.staging,
        "kv_policy": order.kv_policy,
        "learner_gpus": arguments.learner_gpus,
        "engine_gpus": arguments.engine_gpus,
        "are_shared": are_shared,
        "bytes": lines[0]["bytes"] if lines else 0,
        "failed": {x["version"]: x["failed"] for x in lines if x["failed"]},
    }
    found["ours"] = medians(of_each[WARM_UP:])
    found["first_version"] = of_each[0] if of_each else {}
    if arguments.native:
        found |= peers(msgspec.structs.replace(order, versions=4), output, places, arguments.native_limit_s)
    for who in ("ours", *NATIVE):
        if found.get(who):
            found[who]["gb_per_s"] = round(found["bytes"] / found[who]["first_new_token"] / 1e9, 2)
    for who, ratio in NATIVE.items():
        if found.get(who) and found.get("ours"):
            found[ratio] = round(found[who]["first_new_token"] / found["ours"]["first_new_token"], 2)
    with (output / "results.jsonl").open("a") as results:
        results.writelines(json.dumps(line) + "\n" for line in (*lines, found))
    print(json.dumps(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU that the engine takes")
    parser.add_argument("--kv-policy", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="deadline of a broadcast")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for ours")
    parser.add_argument("--native-limit-s", type=float, default=150.0, help="for the engine's own")
    parser.add_argument("--native", action="store_true", help="the engine's own transfer too")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
