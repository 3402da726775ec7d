"""The gain of a further worker on one machine: the same recipe with 1, 2, 3 and 4 workers, one run after another.

    python -m benchmarks.worker_counts --output DIR [--workers 1,2,3,4] [--steps 60] [--recipe arithmetic.yaml]
        [key=value ...]

First comes the warm-up, into OUTPUT/sft, from where all runs start. `key=value` are overrides of the recipe for all
runs. Every process has one thread (OMP_NUM_THREADS=1). Steps count from the eleventh on: engines are up, and samples
are as old as they get. A run that has ended is not run again: give the same output to go on.

samples_per_s   trajectories trained in a second; `speedup` is that over the first run's
tokens_per_s    tokens of these responses
learner_waits   the share of its time in which the learner had no batch
cpus            cores that learner, workers and server kept busy meanwhile, and those that all other processes did:
                figures count only where `others` is close to 0

Run it on a machine that does nothing else. The last line is one JSON object; progress goes to standard error.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.learns.parts import CPU, SECONDS, SFT, finish
from benchmarks.repeated import repeated
from headway.broker.schema.metrics import StepMetrics
from headway.deploy.run.report import METRICS, lineage, read_lines
from headway.deploy.run.stage_output import is_complete

FIRST = 10
"""The number of first steps that do not count."""
LOOK_S = 0.2
CPUS = "cpus.json"
ROLES = {"learner": "learner", "worker": "workers"}
"""Roles by the command that their processes run."""


class CpuTime:
    """Seconds of CPU that this process's descendants use from step FIRST on, by role."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._before: dict[str, float] | None = None
        self._by_process: dict[int, tuple[str, float]] = {}
        self._started = self._ended = 0.0
        self._total: dict[str, float] = {}

    def look(self) -> None:
        """Note the seconds that have been used so far."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                if command := process.cmdline():  # a process that has ended, and has not been waited for, has none
                    self._by_process[process.pid] = role_of(command), times.user + times.system
        if self._before is None and self._has_begun():
            self._before, self._started = self._sums(), time.monotonic()
        self._total, self._ended = self._sums(), time.monotonic()

    def cores(self) -> dict[str, float]:
        """Return the mean number of busy cores. Call it after a `look` that came after step FIRST."""
        assert self._before is not None
        seconds = self._ended - self._started
        used = {role: (self._total[role] - self._before.get(role, 0.0)) / seconds for role in self._total}
        machine = used.pop("machine")
        return {
            **{role: round(cores, 2) for role, cores in used.items()},
            "others": round(machine - sum(used.values()), 2),
        }

    def _has_begun(self) -> bool:
        return self._metrics.exists() and self._metrics.read_bytes().count(b"\n") >= FIRST

    def _sums(self) -> dict[str, float]:
        busy = psutil.cpu_times()
        sums = {"machine": busy.user + busy.system + busy.nice + busy.irq + busy.softirq}
        for role, seconds in self._by_process.values():
            sums[role] = sums.get(role, 0.0) + seconds
        return sums


def role_of(command: list[str]) -> str:
    """Return the role of a process by its command line: one of ROLES' values, or `supervisor` for the rest."""
    if command and "valkey" in command[0]:
        return "server"
    return next((role for word, role in ROLES.items() if word in command), "supervisor")


def watching(cpu: CpuTime) -> AbstractContextManager[None]:
    """Look now and then, in a thread, until the end of the block."""
    return repeated(cpu.look, LOOK_S)


def figures(directory: Path) -> dict[str, Any]:
    """Return the figures of a run that has ended."""
    counted = lineage(read_lines(directory / METRICS, StepMetrics))[FIRST:]
    seconds = sum(step.step_s for step in counted)
    return {
        "samples_per_s": round(sum(step.trajectories for step in counted) / seconds, 1),
        "tokens_per_s": round(sum(step.trajectories * step.response_tokens_mean for step in counted) / seconds, 1),
        "learner_waits": round(sum(step.take_s for step in counted) / seconds, 3),
        "lag_mean": round(fmean(step.lag_mean for step in counted), 2),
        "lag_max": max(step.lag_max for step in counted),
        "seconds": round(seconds, 1),
        "cpus": json.loads((directory / CPUS).read_text()),
    }


def finish_run(count: int, options: argparse.Namespace) -> Path:
    """Run the recipe with so many workers, unless that has ended, and return the run's directory."""
    directory: Path = options.output / f"workers-{count}"
    if (directory / SECONDS).exists():
        return directory
    cpu = CpuTime(directory / METRICS)
    with watching(cpu):
        finish(
            [
                *("run", options.recipe, "--overwrite", *CPU, f"learner.steps={options.steps}", "evaluation.prompts=0"),
                *options.overrides,
                *(f"run.directory={options.output}", f"run.name={directory.name}", f"workers.count={count}"),
                *(f"model.path={options.output / SFT}", "sft.phases=[]"),
            ],
            directory,
            options.timeout_s,
        )
    (directory / CPUS).write_text(json.dumps(cpu.cores()))
    return directory


def main() -> int:
    """Return the exit code: 1 if a run failed."""
    options = _parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[int, dict[str, Any]] = {}
    try:
        if not is_complete(options.output / SFT):
            arguments = ["sft", options.recipe, "--output", str(options.output / SFT), *CPU, *options.overrides]
            finish(arguments, options.output / SFT, options.timeout_s)
        for count in options.workers:
            print(f"{time.strftime('%H:%M:%S')} {count} workers", file=sys.stderr, flush=True)
            found[count] = figures(finish_run(count, options))
            print(json.dumps({count: found[count]}), file=sys.stderr, flush=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    first = found[options.workers[0]]["samples_per_s"]
    speedup = {count: round(one["samples_per_s"] / first, 2) for count, one in found.items()}
    print(json.dumps({"recipe": options.recipe, "cores": os.cpu_count(), "workers": found, "speedup": speedup}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker_counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all runs")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=_counts, default=(1, 2, 3, 4), metavar="N,...")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--recipe", default="arithmetic.yaml")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one run")
    options = parser.parse_intermixed_args()
    if options.steps <= FIRST:
        parser.error(f"--steps {options.steps}: the first {FIRST} do not count")
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
