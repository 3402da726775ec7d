"""What asynchrony pays: one recipe on the same GPUs asynchronously, and synchronously in both ways.

    python -m benchmarks.asynchrony --model DIR --output DIR [--gpus 4] [--learner-gpus 2] [--workers-per-gpu 2]
        [--runs asynchronous,separated,colocated] [--of RUN key=value ...] [key=value ...]

asynchronous   learner and engines on GPUs of their own, samples as old as the recipe allows
separated      the same, and nothing is generated while the learner trains: max_lag 0
colocated      all GPUs to both in turns, max_lag 0; one engine on each

`key=value` are overrides of the recipe for all runs, `--of` of one run, so that each has the batch sizes that suit it
best. A run that has ended is not run again. Steps count from the third on, when engines are up and everything is
compiled. Without GPUs (`--gpus 0`) it is a rehearsal. The last line is one JSON object.
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learns.parts import CPU, SECONDS, finish
from broker.schema import StepMetrics
from deploy.report import METRICS, lineage, read_lines, read_summary

RECIPE = "smollm2-reasoning-gym.yaml"
ON_POLICY = ("staleness.max_lag=0", "weights.swaps_at_once=1")
RUNS = {
    "asynchronous": (),
    "separated": ON_POLICY,
    "colocated": (*ON_POLICY, "run.placement=colocated"),
}
TARGET = 2.0
"""Times the samples per second of the better synchronous run."""
FIRST = 2
"""Steps that are not counted."""
LOOK_S = 0.2


def placement(run: str, gpus: int, learner_gpus: int, workers_per_gpu: int) -> tuple[str, ...]:
    """Overrides that put learner and engines on the GPUs."""
    if gpus == 0:
        return CPU
    if run == "colocated":
        return (f"learner.processes={gpus}",)
    devices = [gpu for gpu in range(learner_gpus, gpus) for _ in range(workers_per_gpu)]
    share = 0.8 / workers_per_gpu
    return (
        f"learner.processes={learner_gpus}",
        f"workers.count={len(devices)}",
        f"workers.devices={devices}",
        f"engine.options.gpu_memory_utilization={share:.2f}",
        "weights.transport=ipc",  # NCCL has no place for two engines on one GPU
    )


@dataclass
class Utilization:
    """Of each GPU, the share of the time in which any kernel ran, while the counted steps were made."""

    metrics: Path
    steps: int
    seen: list[list[float]] = field(default_factory=list)

    def look(self) -> None:
        """Nothing where there is no GPU, or the counted steps have not begun."""
        done = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
        if FIRST <= done < self.steps:
            self.seen.append(gpu_use())

    def mean(self) -> list[float]:
        """By GPU."""
        return [round(fmean(of_one) / 100, 3) for of_one in zip(*self.seen, strict=True)]


def gpu_use() -> list[float]:
    """Per cent, by GPU; [] without any."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    return [float(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]


@contextmanager
def watching(utilization: Utilization) -> Iterator[None]:
    """Look at it until the end of the block."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            utilization.look()

    thread = threading.Thread(target=watch, name="utilization")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def figures(directory: Path) -> dict[str, Any]:
    """Of a run that has ended."""
    summary, steps = read_summary(directory), lineage(read_lines(directory / METRICS, StepMetrics))
    counted = steps[FIRST:]
    seconds = sum(step.step_s for step in counted)
    return {
        "samples_per_s": round(sum(step.trajectories for step in counted) / seconds, 1),
        "tokens_per_s": round(sum(step.trajectories * step.response_tokens_mean for step in counted) / seconds, 1),
        "learner_waits": round(sum(step.take_s for step in counted) / seconds, 3),
        "step_seconds": {
            phase: round(fmean(getattr(step, f"{phase}_s") for step in counted), 3)
            for phase in ("take", "train", "publish", "step")
        },
        "samples": sum(step.trajectories for step in steps),
        "rewards": [round(step.reward_mean, 3) for step in steps],
        "reward_first": summary["reward_first"],
        "reward_last": summary["reward_last"],
        "pass_rate_before": summary["eval_before"],
        "pass_rate_after": summary["eval_after"],
        "lag_mean": round(fmean(step.lag_mean for step in counted), 3),
        "max_lag": summary["max_lag_seen"],
        "response_tokens_mean": round(fmean(step.response_tokens_mean for step in counted), 1),
    }


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The asynchronous run over the better synchronous one, as far as they have been run."""
    synchronous = [one["samples_per_s"] for name, one in found.items() if name != "asynchronous"]
    if "asynchronous" not in found or not synchronous:
        return {}
    times = found["asynchronous"]["samples_per_s"] / max(synchronous)
    return {"times_faster": round(times, 2), "target": TARGET, "met": times >= TARGET}


def main() -> int:
    """The exit code: 1 if a run failed."""
    options = _parse()
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for run in options.runs:
        directory = options.output / run
        utilization = Utilization(directory / METRICS, options.steps)
        print(f"{time.strftime('%H:%M:%S')} {run}", file=sys.stderr, flush=True)
        try:
            if not (directory / SECONDS).exists():
                with watching(utilization):
                    finish(_arguments(run, options), directory, options.timeout_s)
                (directory / "gpu_use.json").write_text(json.dumps(utilization.mean()))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[run] = str(error)[-200:]
            continue
        found[run] = figures(directory) | {"gpu_use": json.loads((directory / "gpu_use.json").read_text())}
        print(json.dumps({run: found[run]}), file=sys.stderr, flush=True)
    print(json.dumps({"gpus": options.gpus, **found, **compared(found), "failed": failed}))
    return int(bool(failed))


def _arguments(run: str, options: argparse.Namespace) -> list[str]:
    return [
        "run",
        options.recipe,
        "--overwrite",
        *([f"model.path={options.model}", "sft.phases=[]"] if options.model else []),
        f"run.directory={options.output}",
        f"run.name={run}",
        f"learner.steps={options.steps}",
        *placement(run, options.gpus, options.learner_gpus, options.workers_per_gpu),
        *RUNS[run],
        *options.overrides,
        *(value for name, *values in options.of for value in values if name == run),
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all runs")
    parser.add_argument("--model", type=Path, help="one that has been warmed up; default: the recipe's own, with it")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--runs", type=_runs, default=tuple(RUNS), metavar="RUN,...", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--of", nargs="+", action="append", default=[], metavar=("RUN", "key=value"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--learner-gpus", type=int, default=2, help="unless they are shared")
    parser.add_argument("--workers-per-gpu", type=int, default=2, help="unless they are shared")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one run")
    options = parser.parse_intermixed_args()
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    options.model = options.model and options.model.absolute()
    return options


def _runs(text: str) -> Sequence[str]:
    asked = text.split(",")
    if unknown := set(asked) - set(RUNS):
        raise argparse.ArgumentTypeError(f"no run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
