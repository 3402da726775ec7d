"""See benchmarks/worker_overhead/__init__.py. The last line is one JSON object."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import psutil
import torch

from benchmarks.throughput import isolated
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.rollout_workers.config import EngineConfig

from .learner import StandInLearner
from .paced import KIND
from .workload import Workload, rate, write_model

RUN = "worker-overhead"
TARGETS = {"no_updates": 0.97, "updates": 0.93}
"""The targets, as shares of bare vLLM's tokens per second."""
ON_GPU = {
    "learner.device": "cuda",
    "weights.transport": "ipc",
    "weights.staging": "device",
}
LOOK_S, FEED_S = 0.02, 0.5
START_S = 600.0
"""The most seconds that vLLM may take to compile and capture."""


def recipe_of(workload: Workload) -> Recipe:
    """Return the recipe that the worker reads from the broker. Its other keys concern only a learner."""
    engine = workload.engine
    values = {
        "run.name": RUN,
        "model.path": workload.model_dir,
        "model.dtype": engine.dtype,
        "engine": msgspec.to_builtins(engine),
        "sampling.max_new_tokens": workload.max_new_tokens,
        "learner.group_size": workload.group_size,
        "weights.broadcast_timeout_s": 120,
        "weights.kv_policy": workload.kv_policy,
        **(ON_GPU if torch.cuda.is_available() else {}),
        "workers.patience_s": START_S,
        "broker.lease_ttl_s": 60,
        "broker.max_bytes": 4 << 30,
    }
    return load_recipe("arithmetic-dense.yaml", [f"{key}={json.dumps(value)}" for key, value in values.items()])


@contextmanager
def worker_process(url: str, profile: Path | None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `headway worker`, under cProfile if a profile is wanted; it ends with the run."""
    profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
    process = subprocess.Popen(
        [sys.executable, *profiler, "-m", "headway", "worker"],
        env={**os.environ, "HEADWAY_BROKER": url, "HEADWAY_RUN": RUN},
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def measure_worker(workload: Workload, laps: dict[str, float], profile: Path | None) -> dict[str, dict[str, Any]]:
    """Return one worker's laps by name, from its heartbeats: `laps` has the seconds between two updates, 0 for none."""
    with (
        tempfile.TemporaryDirectory(prefix="headway-") as directory,
        EmbeddedServer(Path(directory), maxmemory_bytes=8 << 30) as server,
    ):
        log = Path(directory) / "worker.log"
        learner = StandInLearner(server.url, recipe_of(workload))
        try:
            with worker_process(server.url, profile, log) as worker:
                try:
                    _until_it_generates(learner, worker)
                    return {name: _lap(learner, workload, every_s) for name, every_s in laps.items()}
                finally:
                    learner.close()
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def _until_it_generates(learner: StandInLearner, worker: "subprocess.Popen[bytes]") -> None:
    learner.feed()
    learner.publish()
    began = time.monotonic()
    while (info := learner.worker()) is None or not info.generated_tokens:
        if worker.poll() is not None or time.monotonic() > began + START_S:
            raise RuntimeError(f"no worker generates after {time.monotonic() - began:.0f} s")
        time.sleep(FEED_S)


def _lap(learner: StandInLearner, workload: Workload, update_every_s: float) -> dict[str, Any]:
    """Return the worker's figures after a warm-up, in which updates begin: the first ones map buckets and compile."""
    info = learner.worker()
    assert info is not None
    process, published, taken = psutil.Process(info.pid), [], learner.taken
    samples: list[tuple[float, float, float]] = []
    first_swap, first_submitted = info.swaps, info.submitted
    feeds = updates = time.monotonic()
    begins = updates + workload.warm_up_s
    ends = begins + workload.seconds
    while (now := time.monotonic()) < ends:
        seen = learner.worker()
        if seen is not None and now >= begins and (not samples or seen.generated_tokens != samples[-1][1]):
            times = process.cpu_times()
            samples.append((now, float(seen.generated_tokens), times.user + times.system))
            info = seen
        if now >= feeds:
            learner.feed()
            feeds = now + FEED_S
        if update_every_s and now >= updates:
            learner.take()
            published.append(learner.publish().seconds)
            updates += update_every_s
        time.sleep(LOOK_S)
    samples = samples[1:]  # the first may be an older heartbeat
    return rate(samples) | {
        "by_heartbeat": [round((b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(samples)],
        "submitted": info.submitted - first_submitted,
        "swaps": info.swaps - first_swap,
        "publish_s": round(fmean(published), 2) if published else None,
        "taken": learner.taken - taken,
        "last_error": info.last_error,
    }


def main() -> None:
    """Print the figures, and beside each whether its target was met."""
    options = _parse()
    workload = _workload(options)
    directory = write_model(workload, options.models, "cuda" if torch.cuda.is_available() else "cpu", START_S)
    workload = msgspec.structs.replace(workload, model_dir=str(directory))
    order = msgspec.to_builtins(workload)
    os.environ.setdefault("OMP_NUM_THREADS", str(workload.engine.threads))  # for vLLM's processes on both sides
    timeout_s = START_S + 2 * (workload.warm_up_s + workload.seconds)
    outcome = isolated.run("benchmarks.worker_overhead.bare:measure", order, 1, timeout_s)
    if "error" in outcome:
        raise SystemExit(outcome["error"])
    bare = outcome["result"]
    _tell(f"bare: {bare}")
    result: dict[str, Any] = {"bare": bare}
    laps = {"no_updates": 0.0} | ({"updates": options.update_every} if options.update_every else {})
    for name, worker in measure_worker(workload, laps, options.profile).items():
        ratio = worker["tokens_per_s"] / bare["same_arguments"]["tokens_per_s"]
        default_ratio = worker["tokens_per_s"] / bare["default_streaming"]["tokens_per_s"]
        result[name] = worker | {
            "over_bare": round(ratio, 3),
            "over_default_streaming": round(default_ratio, 3),
            "target": TARGETS[name],
            "met": ratio >= TARGETS[name],
        }
        _tell(f"{name}: {result[name]}")
    settings = {"paced": options.paced, "shape": options.shape, "kv_policy": options.kv_policy, **order["engine"]}
    print(json.dumps(settings | result))


def _workload(options: argparse.Namespace) -> Workload:
    if options.paced:
        ours = {"step_s": options.step_ms / 1000, "mean_tokens": options.mean_tokens}
    else:  # the learner's stand-in has its weights on the engine's GPU
        ours = {"gpu_memory_utilization": 0.7} if torch.cuda.is_available() else {}
    return Workload(
        shape=options.shape,
        engine=EngineConfig(
            kind=KIND if options.paced else "vllm",
            max_concurrent=options.concurrent,
            max_model_len=options.max_new_tokens + 160,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            device="cuda" if torch.cuda.is_available() else "cpu",
            options=ours | json.loads(options.engine_options),
        ),
        max_new_tokens=options.max_new_tokens,
        mean_tokens=options.mean_tokens,
        group_size=8,
        kv_policy=options.kv_policy,
        warm_up_s=options.warm_up,
        seconds=options.seconds,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", default="moe-2.4b" if on_gpu else "toy", help="of benchmarks.throughput.shapes")
    parser.add_argument("--concurrent", type=int, default=512 if on_gpu else 64)
    parser.add_argument("--max-new-tokens", type=int, default=2048 if on_gpu else 256)
    parser.add_argument("--mean-tokens", type=int, default=500 if on_gpu else 64)
    parser.add_argument("--warm-up", type=float, default=15.0 if on_gpu else 3.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=60.0 if on_gpu else 10.0, help="of every lap")
    parser.add_argument("--update-every", type=float, default=10.0, metavar="S", help="0: no lap with updates")
    parser.add_argument("--kv-policy", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--engine-options", default="{}", help="JSON: vLLM engine arguments for both sides")
    parser.add_argument("--paced", action="store_true", help="vLLM's front end around a core that samples nothing")
    parser.add_argument("--step-ms", type=float, default=12.0, help="of the paced core")
    parser.add_argument("--profile", type=Path, help="cProfile's file of the worker (which it slows down)")
    parser.add_argument("--models", type=Path, help="default: in memory if it has room, else the temporary folder")
    return parser.parse_args()


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
