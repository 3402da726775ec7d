"""python -m benchmarks.staleness.pipeline: the same comparison through the real asynchronous pipeline.

`headway run` has several workers, so that lag follows from the queues: it is random, mixed within a batch and within a
response, and bounded by staleness.max_lag. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import command
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.learner.algorithm_config import AlgorithmConfig

from .compositions import COMPOSITIONS

NAMES = ("grpo/none", "grpo/sequence_tis", "grpo/dppo", "grpo/behavior_clip")
LEARNING_RATE = 5e-4


def main() -> int:
    """Return the exit code: 1 if a run failed."""
    options = _parse()
    out = options.out.resolve()
    trials = [
        (name, _recipe(name, lag, seed, out, options))
        for seed in range(options.seeds)
        for lag in options.lags
        for name in options.only
    ]
    with ThreadPoolExecutor(options.parallel) as pool:
        first = {recipe.run.seed: recipe for _, recipe in trials if not (_start(recipe, out) / "done").exists()}
        list(pool.map(lambda recipe: _warm_up(recipe, out), first.values()))
        failed = sum(pool.map(lambda trial: _run(trial[1], out), trials))
    return command.finish({"directory": str(out), "failed": failed, "compositions": _summary(trials)}, failed)


def _recipe(name: str, lag: int, seed: int, out: Path, options: argparse.Namespace) -> Recipe:
    overrides = [
        f"run.name={name.replace('/', '-')}-lag{lag}-seed{seed}",
        f"run.directory={out}",
        f"run.seed={seed}",
        f"staleness.max_lag={lag}",
        f"workers.count={options.workers}",
        f"learner.steps={options.steps}",
        f"optimizer.learning_rate={LEARNING_RATE}",
    ]
    algorithm = msgspec.convert(COMPOSITIONS[name], AlgorithmConfig)
    return msgspec.structs.replace(load_recipe("arithmetic.yaml", overrides), algorithm=algorithm)


def _start(recipe: Recipe, out: Path) -> Path:
    return out / "starts" / str(recipe.run.seed)


def _warm_up(recipe: Recipe, out: Path) -> None:
    """Warm up once for each seed; all of its runs begin with the same weights."""
    start = _start(recipe, out)
    if _headway("sft", _written(recipe, start), start / "log"):
        sys.exit(f"The warm-up of seed {recipe.run.seed} failed; see {start / 'log'}.")
    shutil.copytree(recipe.run_directory / "sft", start / "sft")
    shutil.rmtree(recipe.run_directory)
    (start / "done").touch()


def _run(recipe: Recipe, out: Path) -> bool:
    """Run a trial unless its run is there already, and return whether it failed."""
    directory = recipe.run_directory
    if (directory / "summary.json").exists():
        return False
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(_start(recipe, out) / "sft", directory / "sft")
    failed = _headway("run", _written(recipe, out / "recipes"), out / "logs" / f"{recipe.run.name}.log")
    command.tell(f"{recipe.run.name}: {'failed' if failed else _figures(recipe)}")
    return failed


def _written(recipe: Recipe, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{recipe.run.name}.yaml"
    path.write_text(dump_recipe(recipe))
    return path


def _headway(command: str, recipe: Path, log: Path) -> bool:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        arguments = [sys.executable, "-m", "headway", command, str(recipe)]
        return (
            subprocess.run(arguments, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
            != 0
        )


def _figures(recipe: Recipe) -> dict[str, Any]:
    summary = json.loads((recipe.run_directory / "summary.json").read_bytes())
    lines = (recipe.run_directory / "metrics.jsonl").read_bytes().splitlines()
    steps = [msgspec.json.decode(line, type=StepMetrics) for line in lines]
    return {
        "final": summary["eval_after"],
        "lag_mean": round(statistics.fmean(step.lag_mean for step in steps), 2),
        "lag_max": summary["max_lag_seen"],
    }


def _summary(trials: Sequence[tuple[str, Recipe]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name, recipe in trials:
        if (recipe.run_directory / "summary.json").exists():
            found.setdefault(name, {}).setdefault(recipe.staleness.max_lag, []).append(_figures(recipe))
    return {
        name: {
            str(lag): {
                "mean": round(statistics.fmean(run["final"] for run in runs), 4),
                "std": round(statistics.stdev(run["final"] for run in runs), 4) if len(runs) > 1 else None,
                "seeds": len(runs),
                "lag_mean": round(statistics.fmean(run["lag_mean"] for run in runs), 2),
                "lag_max": max(run["lag_max"] for run in runs),
            }
            for lag, runs in lags.items()
        }
        for name, lags in found.items()
    }


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "staleness.pipeline")
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0")
    parser.add_argument("--lags", type=command.numbers, default=[0, 8, 16])
    parser.add_argument("--only", nargs="+", choices=list(COMPOSITIONS), default=list(NAMES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4, help="of each run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness-pipeline"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
