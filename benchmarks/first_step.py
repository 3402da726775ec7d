"""Seconds from the command `headway run` to the first trained step, and all that comes before it.

    python -m benchmarks.first_step [--runs 2] [--caches DIR] [--recipe arithmetic-vllm.yaml] [key=value ...]
    python -m benchmarks.first_step --shape qwen3-0.6b --gpus 1 learner.device=cuda engine.device=cuda [key=value ...]
    python -m benchmarks.first_step --gpus 2 --workers-per-gpu 4 --recipe smollm2-reasoning-gym.yaml model.path=DIR

`--shape` writes random weights of that shape, from which the recipe's model is then loaded. They have the alphabet of
arithmetic and no chat template, so they are for recipes like arithmetic-vllm.yaml; others need a model of their own.
Stages before reinforcement learning and evaluations are left out. A run is stopped after its second step; one that has
not come so far when it ends, or after `--timeout-s`, is the last, and the exit code is 1. `--caches`: a directory in
which the command makes a new one, for all that vLLM, Triton, torch and Headway keep: its first run finds nothing, later
ones what earlier ones left.

For each run, `workers` and `learner` have the seconds of the marks in their logs, and `parts` the seconds from mark to
mark in the worker whose engine was up last, of which the first step's time is the sum. The last line is one JSON
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from . import command
from .gpus import NO_MULTICAST, placement
from .models import written

LOOK_S = 0.05
STEPS = 2
MARKS = {
    "worker_waits": "has no learner yet",
    "core_imported": "Initializing a V1 LLM engine",
    "model_made": "Model loading took",
    "compiled": r"torch\.compile took",
    "profiled": "GPU KV cache size",
    "graphs_recorded": "Graph capturing finished",
    "core_ready": "init engine .profile",
    "engine_up": r"engine \w+ is up",
    "weights": r"version \S+ (pulled|received)",
    "base_pulled": "the base of adapters has come",
    "base_loaded": "holds the base of adapters",
}
"""The words of a line in a worker's log, the first of which is the mark's time. Those of vLLM are of 0.26 to 0.32. Only
runs that train an adapter have a base."""
OF_LEARNER = {"base_served": "serves the base of adapters", "announced": "is the first that is announced"}
"""The words of lines in the learner's log."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def main() -> int:
    """Measure all runs, as the command line says. Return the exit code: 1 if one failed."""
    options = _parse()
    command.end_children_at_sigterm()
    overrides = ["stages=[{kind: rl}]", "learner.steps=1000", "evaluation.prompts=0", *options.overrides]
    if options.gpus:
        overrides = [*placement(options.gpus, options.workers_per_gpu), *overrides]
    if options.shape:
        directory = written(options.shape, device="cuda" if options.gpus else "cpu")
        overrides = [f"model.path={directory}", *overrides]
    environment = {**os.environ, **NO_MULTICAST, "VLLM_LOGGING_LEVEL": "INFO", **new_caches(options.caches)}
    runs = []
    for _ in range(options.runs):
        runs.append(_run(options.recipe, overrides, environment, options.timeout_s))
        command.tell(json.dumps(runs[-1]))
        if "error" in runs[-1]:
            command.tell(runs[-1]["error"])
            break
    found = {"recipe": options.recipe, "gpus": options.gpus, "cores": os.cpu_count()}
    return command.finish({**found, "overrides": overrides, "runs": runs}, "error" in runs[-1])


def new_caches(directory: Path | None) -> dict[str, str]:
    """Return the environment in which everything that a start may find again lies in a new directory below this one."""
    if directory is None:
        return {}
    directory.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=directory.resolve()))  # an earlier command may have failed midway, and left some
    return {"XDG_CACHE_HOME": str(new), **{name: str(new / below) for name, below in CACHES.items()}}


def _run(recipe: str, overrides: list[str], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """Return what is known of one run."""
    with tempfile.TemporaryDirectory(prefix="headway-first-step-") as directory:
        run = Path(directory, "run")
        started = [sys.executable, "-m", "headway", "run", recipe, f"run.directory={directory}", "run.name=run"]
        words = Path(directory, "words")
        with (
            words.open("w") as told,
            subprocess.Popen(
                [*started, *overrides], stdout=subprocess.DEVNULL, stderr=told, env=environment
            ) as process,
        ):
            seen = _Seen(run, psutil.Process(process.pid))
            try:
                while process.poll() is None and seen.now_s() < timeout_s and not seen.is_over():
                    seen.look()
                    time.sleep(LOOK_S)
            finally:
                while process.poll() is None:  # the second time it ends its children at once
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(1.0)
        if not seen.is_over():
            logs = [one.read_text()[-600:] for one in sorted((run / "logs").glob("*.log"))]
            error = words.read_text(errors="replace")[-2000:].strip() or f"no second step in {timeout_s:g} s"
            return {**seen.all(), "exit_code": process.returncode, "error": error, "log": logs}
        return seen.all()


@dataclass
class _Seen:
    """The events of a run until now, in seconds since its command."""

    run: Path
    command: psutil.Process
    workers: dict[str, dict[str, float]] = field(default_factory=dict)
    learner: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.command.create_time()

    def now_s(self) -> float:
        return round(time.time() - self._began, 2)

    def is_over(self) -> bool:
        return len(self.steps) >= STEPS

    def look(self) -> None:
        """Note the time of all that is there for the first time."""
        logs = self.run / "logs"
        for log in logs.glob("worker-*.log"):
            self._mark(self.workers.setdefault(log.stem, {}), MARKS, log)
        for log in logs.glob("learner.log"):
            self._mark(self.learner, OF_LEARNER, log)
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        self.steps += [self.now_s()] * (len(lines) - len(self.steps))
        if lines and not self.first:
            self.first = {name: round(value, 2) for name, value in json.loads(lines[0]).items() if name in FIRST}

    def _mark(self, marks: dict[str, float], of_words: dict[str, str], log: Path) -> None:
        text = log.read_text(errors="replace")
        for name, words in of_words.items():
            if name not in marks and re.search(words, text):
                marks[name] = self.now_s()

    def all(self) -> dict[str, Any]:
        """Return everything, as JSON has it."""
        last = max(self.workers.values(), key=lambda marks: marks.get("engine_up", 0.0), default={})
        marks = dict(last)
        if self.steps:
            marks["first_step"] = self.steps[0]
        in_order = sorted(marks.items(), key=lambda mark: mark[1])
        before = [0.0, *(at for _, at in in_order)]
        return {
            "first_step_s": next(iter(self.steps), None),
            "parts": {name: round(at - since, 2) for (name, at), since in zip(in_order, before, strict=False)},
            "of_first_step": self.first,
            "workers": self.workers,
            "learner": self.learner,
        }


FIRST = ("take_s", "train_s", "publish_s", "step_s", "time_s")
"""The seconds that the learner notes of its first step."""


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "first_step")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", default="arithmetic-vllm.yaml")
    parser.add_argument("--shape", default="", help="of random weights; empty: the recipe's own model")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--workers-per-gpu", type=int, default=1, help="unless they share the learner's")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--caches", type=Path, help="the place of new caches; by default the user's own are used")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one run")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
