"""The number of samples that a student needs to reach its teacher, by on-policy distillation and by RL.

    python -m benchmarks.distillation --output DIR [--seeds 3] [--timeout-s 900] [--teacher DIR --student DIR]
        [key=value ...]

The recipe is distill.yaml. Its stages `teacher` and `student` come first, unless their models are given; then two runs
start from the student and train as many samples in each step: `distillation` one sample of each of 64 prompts, `grpo`
eight of each of 8. Both are evaluated on the same held-out prompts every few steps. All of this is done for each seed,
and a result counts only where every seed shows it. `key=value` are overrides of both, such as `learner.steps=60`. A run
that has ended is not run again: give the same output to go on, or with more seeds. The last line is one JSON object:
for each seed the pass rates by trained samples and the samples after which a run is within 0.05 of its teacher; of all
seeds the means, and whether distillation came so close on fewer samples than RL. If not, the exit status is 1.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.events import EvaluationEvent
from headway.deploy.run.report import EVALUATIONS, SUMMARY, lineage, read_lines

RECIPE, WARM = "distill.yaml", "warm"
CLOSE = 0.05
DEFAULTS = ("learner.steps=40", "evaluation.every_steps=5")
RUNS: dict[str, tuple[str, ...]] = {
    "distillation": (),
    "grpo": ("algorithm={preset: grpo}", "teacher={}", "learner.groups_per_step=8", "learner.group_size=8"),
}

Figures = dict[str, Any]
"""The figures of one seed: its number, the teacher's pass rate, and the pass rates of each run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0")
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--student", type=Path)
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    seeds = [_figures(seed, options) for seed in range(options.seeds)]
    of_all = summary_of(seeds)
    print(json.dumps({"seeds": seeds, "of_all": of_all}))
    return int(not of_all["distillation_needs_fewer_samples"])


def summary_of(seeds: Sequence[Figures]) -> dict[str, Any]:
    """Return the means over seeds, the samples that each needed (null: not reached), and the verdict."""
    reached = {name: [seed[name]["samples_to_reach_teacher"] for seed in seeds] for name in RUNS}
    pairs = zip(reached["distillation"], reached["grpo"], strict=True)
    return {
        "teacher": fmean(seed["teacher"] for seed in seeds),
        **{name: _means([seed[name]["pass_rate_by_samples"] for seed in seeds]) for name in RUNS},
        "samples_to_reach_teacher": reached,
        "least_over_teacher_at_last": {name: min(_last_over_teacher(seed, name) for seed in seeds) for name in RUNS},
        "distillation_needs_fewer_samples": all(own is not None and (rl is None or own < rl) for own, rl in pairs),
    }


def rates_of(by_samples: dict[int, float], of_teacher: float) -> dict[str, Any]:
    """Return a run's pass rates, and the number of samples after which one is close to its teacher's."""
    reached = [count for count, rate in by_samples.items() if rate >= of_teacher - CLOSE]
    return {"pass_rate_by_samples": by_samples, "samples_to_reach_teacher": min(reached, default=None)}


def _means(rates: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {count: fmean(each[count] for each in rates) for count in rates[0]}


def _last_over_teacher(seed: Figures, name: str) -> float:
    """Return the pass rate after the last step less the teacher's."""
    rates: Mapping[int, float] = seed[name]["pass_rate_by_samples"]
    return rates[max(rates)] - float(seed["teacher"])


def _figures(seed: int, options: argparse.Namespace) -> Figures:
    output, timeout_s = options.output.resolve() / f"seed-{seed}", options.timeout_s
    own = (*DEFAULTS, *options.overrides, f"run.seed={seed}")
    teacher, student = options.teacher, options.student
    if teacher is None or student is None:
        _headway(output, timeout_s, "--until", "student", f"run.name={WARM}", f"run.seed={seed}")
        warm = output / WARM
        teacher, student = warm / "sft", warm / "stages" / "2-student"
    teacher, student = teacher.resolve(), student.resolve()
    found: Figures = {"seed": seed, "teacher": _pass_rate(output, teacher, timeout_s, seed)}
    for name, overrides in RUNS.items():
        directory = _train(output, name, student, timeout_s, [f"teacher.path={teacher}", *overrides, *own])
        found[name] = rates_of(_by_samples(directory), found["teacher"])
    return found


def _train(output: Path, name: str, model: Path, timeout_s: float, overrides: Sequence[str]) -> Path:
    directory = output / name
    if not (directory / SUMMARY).exists():
        from_student = (f"model.path={model}", "model.random=null", "stages=[{kind: rl}]", f"run.name={name}")
        _headway(output, timeout_s, *from_student, *overrides, "--overwrite")
    return directory


def _pass_rate(output: Path, teacher: Path, timeout_s: float, seed: int) -> float:
    """Return the teacher's pass rate, as that of a run that trains nothing from it."""
    idle = ("learner.steps=1", "optimizer.learning_rate=0", f"teacher.path={teacher}", f"run.seed={seed}")
    directory = _train(output, "of-teacher", teacher, timeout_s, idle)
    return _evaluations(directory)[0].pass_rate


def _by_samples(directory: Path) -> dict[int, float]:
    """Return the run's pass rates on held-out prompts, by the samples trained before."""
    learner = load_recipe(directory / "config.yaml").learner
    samples = learner.groups_per_step * learner.group_size
    return {one.step * samples: one.pass_rate for one in _evaluations(directory)}


def _evaluations(directory: Path) -> list[EvaluationEvent]:
    return lineage(read_lines(directory / EVALUATIONS, EvaluationEvent))


def _headway(output: Path, timeout_s: float, *arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("headway")), "run", RECIPE, f"run.directory={output}", *arguments]
    subprocess.run(command, check=True, timeout=timeout_s, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
