"""Seconds from the command `headway run` to the first trained step, and to what comes before it.

    python -m benchmarks.first_step [--runs 2] [--recipe arithmetic-vllm.yaml] [key=value ...]
    python -m benchmarks.first_step --shape smollm2-135m --gpus 2 --recipe smollm2-reasoning-gym.yaml [key=value ...]

`--shape` writes random weights of that shape, from which the recipe's model is then loaded. Stages before reinforcement
learning and evaluations are left out. The first run finds no compiled kernels, later ones find those that earlier ones
left. `engine_ahead_s` is there if the engine was up before the learner had claimed the run. The last line is one JSON
object.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learns.parts import placement
from benchmarks.throughput import checkpoint
from benchmarks.throughput.shapes import shape_of

LOOK_S = 0.05
MARKS = {
    "worker_waits_s": "has no learner yet",
    "engine_ahead_s": "is up; waiting for the learner",
    "engine_s": r"engine \w+ is up$",
    "weights_s": r"version \S+ (pulled|received)",
}
"""The first line of a worker's log that each figure is the time of."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def main() -> None:
    """Measure all runs, as the command line says."""
    options = _parse()
    overrides = ["stages=[{kind: rl}]", "learner.steps=2", "evaluation.prompts=0", *options.overrides]
    if options.gpus:
        overrides = [*placement(options.gpus, 1), *overrides]
    if options.shape:
        shape = shape_of(options.shape)
        directory = checkpoint.folder(None, options.shape, shape)
        checkpoint.write_isolated(shape, directory, "cuda" if options.gpus else "cpu", 300.0)
        overrides = [f"model.path={directory}", *overrides]
    runs = []
    for _ in range(options.runs):
        runs.append(_run(options.recipe, overrides, options.timeout_s))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"recipe": options.recipe, "gpus": options.gpus, "overrides": options.overrides, "runs": runs}))


def _run(recipe: str, overrides: list[str], timeout_s: float) -> dict[str, Any]:
    """Return the seconds of one run's marks."""
    with tempfile.TemporaryDirectory(prefix="headway-first-step-") as directory:
        run = Path(directory, "run")
        command = [sys.executable, "-m", "deploy", "run", recipe, f"run.directory={directory}", "run.name=run"]
        began = time.monotonic()
        found: dict[str, Any] = {}
        with subprocess.Popen(
            [*command, *overrides], stdout=subprocess.DEVNULL, env={**os.environ, **NO_MULTICAST}
        ) as process:
            try:
                while process.poll() is None and time.monotonic() - began < timeout_s:
                    _look(run, found, time.monotonic() - began)
                    time.sleep(LOOK_S)
            finally:
                process.terminate()  # it stops its own children in order
        found["exit_code"] = process.returncode
        _look(run, found, time.monotonic() - began)
        if process.returncode:
            found["log"] = [one.read_text()[-600:] for one in sorted((run / "logs").glob("*.log"))]
        return found


def _look(run: Path, found: dict[str, Any], now_s: float) -> None:
    """Note the time of every mark that is there for the first time."""
    lines = [line for log in (run / "logs").glob("worker-*.log") for line in log.read_text().splitlines()]
    for name, words in MARKS.items():
        if any(re.search(words, line) for line in lines):
            found.setdefault(name, round(now_s, 1))
    metrics = run / "metrics.jsonl"
    steps = metrics.read_text().count("\n") if metrics.exists() else 0
    for name, count in (("first_step_s", 1), ("second_step_s", 2)):
        if steps >= count:
            found.setdefault(name, round(now_s, 1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", default="arithmetic-vllm.yaml")
    parser.add_argument("--shape", default="", help="of random weights; empty: the recipe's own model")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one run")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
