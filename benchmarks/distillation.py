"""How many samples a student needs to reach its teacher: on-policy distillation, and RL from the same start.

    python -m benchmarks.distillation --output DIR [--timeout-s 900] [--teacher DIR --student DIR] [key=value ...]

The recipe is distill.yaml. Its stages `teacher` and `student` come first, unless their models are given; then two runs
start from the student and train as many samples in each step: `distillation` one sample of each of 64 prompts, `grpo`
eight of each of 8. Both are evaluated on the same held-out prompts every few steps. `key=value` are overrides of both,
such as `evaluation.every_steps=5`. What has ended is not run again: give the same output to go on. The last line is
one JSON object: pass rates by trained samples, and the samples after which a run is within 0.05 of its teacher.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.recipe.loading import load_recipe
from deploy.run.events import EvaluationEvent
from deploy.run.report import EVALUATIONS, SUMMARY, lineage, read_lines

RECIPE, WARM = "distill.yaml", "warm"
CLOSE = 0.05
RUNS: dict[str, tuple[str, ...]] = {
    "distillation": (),
    "grpo": ("algorithm={preset: grpo}", "teacher={}", "learner.groups_per_step=8", "learner.group_size=8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--student", type=Path)
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    output = options.output.resolve()
    teacher, student = options.teacher, options.student
    if teacher is None or student is None:
        _headway(output, options.timeout_s, "--until", "student", f"run.name={WARM}")
        warm = output / WARM
        teacher, student = warm / "sft", warm / "stages" / "2-student"
    pass_rate_of_teacher = _pass_rate(output, teacher.resolve(), options.timeout_s)
    print(json.dumps(_figures(output, teacher.resolve(), student.resolve(), pass_rate_of_teacher, options)))


def _figures(
    output: Path, teacher: Path, student: Path, of_teacher: float, options: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {"teacher": of_teacher}
    for name, overrides in RUNS.items():
        arguments = [f"teacher.path={teacher}", *overrides, *options.overrides]
        directory = _train(output, name, student, options.timeout_s, arguments)
        found[name] = _rates(directory, of_teacher)
    return found


def _train(output: Path, name: str, model: Path, timeout_s: float, overrides: Sequence[str]) -> Path:
    directory = output / name
    if not (directory / SUMMARY).exists():
        from_student = (f"model.path={model}", "model.random=null", "stages=[{kind: rl}]", f"run.name={name}")
        _headway(output, timeout_s, *from_student, *overrides, "--overwrite")
    return directory


def _pass_rate(output: Path, teacher: Path, timeout_s: float) -> float:
    """The teacher's, as that of a run that trains nothing from it."""
    idle = ("learner.steps=1", "optimizer.learning_rate=0", f"teacher.path={teacher}")
    directory = _train(output, "of-teacher", teacher, timeout_s, idle)
    return _evaluations(directory)[0].pass_rate


def _rates(directory: Path, of_teacher: float) -> dict[str, Any]:
    learner = load_recipe(directory / "config.yaml").learner
    samples = learner.groups_per_step * learner.group_size
    rates = {one.step * samples: one.pass_rate for one in _evaluations(directory)}
    reached = [count for count, rate in rates.items() if rate >= of_teacher - CLOSE]
    return {"pass_rate_by_samples": rates, "samples_to_reach_teacher": min(reached, default=None)}


def _evaluations(directory: Path) -> list[EvaluationEvent]:
    return lineage(read_lines(directory / EVALUATIONS, EvaluationEvent))


def _headway(output: Path, timeout_s: float, *arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("headway")), "run", RECIPE, f"run.directory={output}", *arguments]
    subprocess.run(command, check=True, timeout=timeout_s, stdout=sys.stderr)


if __name__ == "__main__":
    main()
