"""The parts that are run: the model from which all start, and the compared runs. Finished ones are kept."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpus import gpu_names
from headway.deploy.run.stage_output import is_complete

from .apart import APART, HELD, POOLS, Pools, finish_apart

SFT, CONTROL = "sft", "control"
ALGORITHMS = ("grpo", "gspo")
PARTS = (SFT, *ALGORITHMS, CONTROL)
"""The parts that are run if no others are asked for."""
KNOWN = (*PARTS, *APART)
SECONDS = "seconds.json"
"""The file with the seconds of the part's command, written last and only if the command ended well."""

CPU = ("learner.device=cpu", "engine.kind=embedded", "engine.device=cpu")


@dataclass(frozen=True, kw_only=True)
class Study:
    """One output directory, and the settings that all its parts share."""

    recipe: str
    model: Path | None
    """The model's directory, or None for the recipe's own."""
    output: Path
    gpus: int
    """The number of GPUs. 0 runs on CPUs; learner and worker share 1; more have a worker on each but the learner's."""
    learner_gpus: int
    overrides: Sequence[str]
    """The user's overrides, which go over the recipe and over the placement on GPUs."""
    control_steps: int
    timeout_s: float
    pools: Pools = field(default_factory=Pools)

    def run(self, part: str) -> None:
        """Run the part, unless it has ended. Raises CalledProcessError or TimeoutExpired, its output on stderr."""
        if (self.directory(part) / SECONDS).exists() or (part == SFT and is_complete(self.directory(part))):
            return
        if part not in APART:
            finish(self._arguments(part), self.directory(part), self.timeout_s)
            return
        began, others = time.monotonic(), gpu_names(self.gpus)[self.learner_gpus :]
        workers = {pool: self.pools.command(pool, others or gpu_names(self.gpus)) for pool in POOLS[part]}
        held_s = finish_apart(self._arguments(part), workers, part, self.timeout_s)
        (self.directory(part) / HELD).write_text(json.dumps(held_s))
        _note_seconds(self.directory(part), began)

    def directory(self, part: str) -> Path:
        """Return the directory of the part's results."""
        return self.output / part

    def _arguments(self, part: str) -> list[str]:
        if part == SFT:
            model = () if self.model is None else (f"model.path={self.model}",)
            arguments = ["sft", self.recipe, "--output", str(self.directory(SFT)), *model]
        else:
            command = "learner" if part in APART else "run"
            arguments = [command, self.recipe, "--overwrite", f"model.path={self.directory(SFT)}"]
            arguments += [f"algorithm.preset={part if part in ALGORITHMS else 'grpo'}"]
        return [
            *arguments,
            f"run.directory={self.output}",
            f"run.name={part}",
            *placement(self.gpus, self.learner_gpus),
            # NCCL would want a GPU for each engine, and two of them share one.
            *(("weights.transport=ipc",) if part in APART and self.gpus else ()),
            *self.overrides,
            *self._of(part),
        ]

    def _of(self, part: str) -> list[str]:
        """Return the overrides that the user's must not undo."""
        if part == SFT:
            return []
        control = ["optimizer.learning_rate=0", f"learner.steps={self.control_steps}"] if part == CONTROL else []
        return ["sft.phases=[]", *control]


def finish(arguments: Sequence[str], directory: Path, timeout_s: float) -> None:
    """Run `headway` with these arguments, which leaves its results in `directory`, and note the seconds there.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    began = time.monotonic()
    command = (sys.executable, "-m", "headway", *arguments)
    # This process's standard output has only one JSON object.
    with subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.terminate()  # it stops its own children in order
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
    _note_seconds(directory, began)


def _note_seconds(directory: Path, began: float) -> None:
    """Write the seconds since then, which say that the part has ended well."""
    (directory / SECONDS).write_text(json.dumps(round(time.monotonic() - began, 1)))


def placement(gpus: int, learner_gpus: int, per_gpu: int = 1) -> tuple[str, ...]:
    """Return overrides that put learner and workers where there is room, so many of these on a GPU of their own."""
    if gpus == 0:
        return CPU
    if gpus == 1:
        return ("workers.count=1",)
    others = gpu_names(gpus)[learner_gpus:] * per_gpu
    return (
        f"learner.processes={learner_gpus}",
        f"workers.count={len(others)}",
        f"workers.devices=[{','.join(others)}]",
        "engine.options.gpu_memory_utilization=0.8",
    )
