"""The parts that are run: the model from which all start, and the compared runs. Finished ones are kept."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpus import gpu_names
from deploy.run.stage_output import is_complete

SFT, CONTROL = "sft", "control"
ALGORITHMS = ("grpo", "gspo")
PARTS = (SFT, *ALGORITHMS, CONTROL)
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

    def run(self, part: str) -> None:
        """Run the part, unless it has ended. Raises CalledProcessError or TimeoutExpired, its output on stderr."""
        if (self.directory(part) / SECONDS).exists() or (part == SFT and is_complete(self.directory(part))):
            return
        finish(self._arguments(part), self.directory(part), self.timeout_s)

    def directory(self, part: str) -> Path:
        """Return the directory of the part's results."""
        return self.output / part

    def _arguments(self, part: str) -> list[str]:
        if part == SFT:
            model = () if self.model is None else (f"model.path={self.model}",)
            arguments = ["sft", self.recipe, "--output", str(self.directory(SFT)), *model]
        else:
            arguments = ["run", self.recipe, "--overwrite", f"model.path={self.directory(SFT)}"]
            arguments += [f"algorithm.preset={'grpo' if part == CONTROL else part}"]
        return [
            *arguments,
            f"run.directory={self.output}",
            f"run.name={part}",
            *placement(self.gpus, self.learner_gpus),
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
    started = time.monotonic()
    command = (sys.executable, "-m", "deploy", *arguments)
    # This process's standard output has only one JSON object.
    with subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.terminate()  # it stops its own children in order
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
    (directory / SECONDS).write_text(json.dumps(round(time.monotonic() - started, 1)))


def placement(gpus: int, learner_gpus: int) -> tuple[str, ...]:
    """Return overrides that put learner and workers where there is room."""
    if gpus == 0:
        return CPU
    if gpus == 1:
        return ("workers.count=1",)
    others = gpu_names(gpus)[learner_gpus:]
    return (
        f"learner.processes={learner_gpus}",
        f"workers.count={len(others)}",
        f"workers.devices=[{','.join(others)}]",
        "engine.options.gpu_memory_utilization=0.8",
    )
