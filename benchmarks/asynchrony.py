"""The gain of asynchrony where responses are long-tailed: a recipe asynchronously, and synchronously in both ways.

    python -m benchmarks.asynchrony --model DIR --output DIR [--gpus 4] [--learner-gpus 1] [--workers-per-gpu 4]
        [--runs asynchronous,separated,colocated] [--of RUN key=value ...] [key=value ...]

asynchronous   learner and engines on GPUs of their own, samples as old as the recipe allows
separated      the same, and nothing is generated while the learner trains: max_lag 0
colocated      all GPUs to both in turns, max_lag 0; one engine on each

The recipe is long_tailed.yaml, DIR SmolLM2-135M-Instruct (see benchmarks.learns.model). First comes the warm-up, into
OUTPUT/sft, from where all runs start; `sft.phases=[]` leaves it out, for a model that has had it. `key=value` are
overrides of the recipe for all parts, `--of` of one run, so that each has the batch sizes that suit it best. Each part
may take `--timeout-s`. A part that has ended is not run again: give the same output to go on. So, on four GPUs, in
commands of less than ten minutes each:

    python -m benchmarks.asynchrony --model DIR --output DIR --runs asynchronous --timeout-s 240   # after the warm-up
    python -m benchmarks.asynchrony --model DIR --output DIR --runs separated
    python -m benchmarks.asynchrony --model DIR --output DIR --runs colocated
    python -m benchmarks.asynchrony --model DIR --output DIR                                       # all figures

Steps count from the eleventh on: engines are up, everything is compiled, and samples are as old as they get. Without
GPUs (`--gpus 0`) it is a rehearsal, and without a model one of a toy. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.gpus import Utilization, gpu_names, watching
from benchmarks.learns.parts import CPU, SECONDS, SFT, finish
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.directory import EXPERIENCE
from headway.deploy.run.figures import EDGE_STEPS
from headway.deploy.run.record import METRICS, lineage, read_lines, read_summary
from headway.deploy.run.stage_output import is_complete
from headway.learner.experience.log import ExperienceLog

RECIPE = str(Path(__file__).with_name("long_tailed.yaml"))
TOY = (
    "model.dtype=float32",
    """model.random={architecture: qwen3, alphabet: "0123456789+-*=,#^", config: {hidden_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, intermediate_size: 128, max_position_embeddings: 256,
    tie_word_embeddings: true, initializer_range: 0.05}}""",
    'model.path=""',
    "prompts.path=arithmetic",
    "prompts.options.most_terms=30",
    'prompts.system_prompt=""',
    "rewards=[{kind: arithmetic}]",
    """sft.phases=[{kind: "benchmarks.long_tailed:worked_examples", path: arithmetic, options: {most_terms: 30},
    learning_rate: 5e-3, max_steps: 300}]""",
    "learner.group_size=8",
    "learner.micro_batch_tokens=8192",
    "optimizer.learning_rate=5e-4",
    "sampling.max_new_tokens=128",
    "engine.dtype=float32",
    "engine.max_concurrent=64",
    "engine.max_model_len=192",
)
"""Overrides of the recipe: other chains, and a model of 100,000 weights that learns them on a CPU."""
ON_POLICY = ("staleness.max_lag=0", "weights.swaps_at_once=1")
RUNS = {
    "asynchronous": (),
    "separated": ON_POLICY,
    "colocated": (*ON_POLICY, "run.placement=colocated"),
}
TARGET = 2.0
"""The target: so many times the samples per second of the better synchronous run."""
FIRST = 10
"""The number of first steps that do not count. They train short responses, which end first."""
GPU_USE = "gpu_use.json"
KV_CACHE_BYTES = 8 << 30
"""The KV cache of an engine among several on a GPU: 200 of SmolLM2-135M's longest samples, at 23 kB a token.

Engines with a given size need not start one after the other to measure the free memory.
"""


def placement(run: str, gpus: int, learner_gpus: int, workers_per_gpu: int) -> tuple[str, ...]:
    """Return overrides that put learner and engines on the GPUs."""
    if gpus == 0:
        return CPU
    if run == "colocated":
        return (f"learner.processes={gpus}", "weights.staging=device")
    devices = [gpu for gpu in gpu_names(gpus)[learner_gpus:] for _ in range(workers_per_gpu)]
    return (
        f"learner.processes={learner_gpus}",
        f"workers.count={len(devices)}",
        f"workers.devices=[{','.join(devices)}]",
        "engine.options.gpu_memory_utilization=0.05",
        f"engine.options.kv_cache_memory_bytes={KV_CACHE_BYTES}",
        "weights.transport=ipc",  # NCCL allows no two engines on one GPU
        "weights.staging=device",
    )


def figures(run: str, directory: Path, learner_gpus: int) -> dict[str, Any]:
    """Return the figures of a run that has ended."""
    gpu_use = json.loads((directory / GPU_USE).read_text())
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
        **experience(directory, [step.step for step in counted]),
        "gpu_use": gpu_use,
        "engines_idle": engines_idle(run, gpu_use, learner_gpus),
    }


def experience(directory: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Return the lengths of the responses that these steps trained, and the smallest number of workers in a step."""
    log = ExperienceLog(directory / EXPERIENCE)
    of_steps = [[sample for group in log.read(step) or () for sample in group.trajectories] for step in steps]
    tokens = [len(sample.response_tokens) for samples in of_steps for sample in samples]
    if not tokens:
        return {}
    of_rank = {f"p{rank}": round(float(np.percentile(tokens, rank)), 1) for rank in (50, 95, 99)}
    return {
        "response_tokens": {"mean": round(fmean(tokens), 1), **of_rank, "max": max(tokens)},
        "fewest_workers": min(len({sample.worker for sample in samples}) for samples in of_steps),
    }


def engines_idle(run: str, gpu_use: Sequence[float], learner_gpus: int) -> float | None:
    """Return the share of time without a kernel on the GPUs that only engines use; None without such GPUs."""
    own = [] if run == "colocated" else gpu_use[learner_gpus:]
    return round(1 - fmean(own), 3) if own else None


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the asynchronous run over the better synchronous one, and rewards, as far as they have been run."""
    steps = min((len(one["rewards"]) for one in found.values()), default=0)
    rewards = {name: round(fmean(one["rewards"][:steps][-EDGE_STEPS:]), 3) for name, one in found.items() if steps}
    equal = {"reward_after_equal_samples": rewards}
    synchronous = [one["samples_per_s"] for name, one in found.items() if name != "asynchronous"]
    if "asynchronous" not in found or not synchronous:
        return equal
    times = found["asynchronous"]["samples_per_s"] / max(synchronous)
    return {"times_faster": round(times, 2), "target": TARGET, "met": times >= TARGET, **equal}


def main() -> int:
    """Return the exit code: 1 if a part failed."""
    options = _parse()
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for part in (*([SFT] if warms_up(options) else []), *options.runs):
        print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
        try:
            finish_part(part, options)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[part] = str(error)[-200:]
            if part == SFT:
                break
            continue
        if part in RUNS:
            found[part] = figures(part, options.output / part, options.learner_gpus)
            print(json.dumps({part: found[part]}), file=sys.stderr, flush=True)
    print(json.dumps({"gpus": options.gpus, **found, **compared(found), "failed": failed}))
    return int(bool(failed))


def finish_part(part: str, options: argparse.Namespace) -> None:
    """Run the part, unless it has ended. Raises CalledProcessError or TimeoutExpired."""
    directory = options.output / part
    if (directory / SECONDS).exists() or (part == SFT and is_complete(directory)):
        return
    utilization = Utilization(directory / METRICS, FIRST, options.steps, options.gpus)
    with watching(utilization):
        finish(_arguments(part, options), directory, options.timeout_s)
    (directory / GPU_USE).write_text(json.dumps(utilization.mean()))


def warms_up(options: argparse.Namespace) -> bool:
    """Whether the recipe, as it is overridden, has a warm-up."""
    return bool(load_recipe(options.recipe, [*_of_recipe(options), *options.overrides]).warm_up)


def _arguments(part: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments of `headway`. Later overrides win: a run starts from the warm-up, whatever the user sets."""
    output, common = options.output, _of_recipe(options)
    if part == SFT:
        where = CPU if options.gpus == 0 else ()
        return ["sft", options.recipe, "--output", str(output / SFT), *common, *where, *options.overrides]
    return [
        "run",
        options.recipe,
        "--overwrite",
        *common,
        f"run.directory={output}",
        f"run.name={part}",
        f"learner.steps={options.steps}",
        *placement(part, options.gpus, options.learner_gpus, options.workers_per_gpu),
        *RUNS[part],
        *options.overrides,
        *(value for name, *values in options.of for value in values if name == part),
        *([f"model.path={output / SFT}", "sft.phases=[]"] if warms_up(options) else []),
    ]


def _of_recipe(options: argparse.Namespace) -> list[str]:
    """Return the overrides that make it the requested recipe, with its model."""
    if options.model:
        return [f"model.path={options.model}"]
    return [*TOY] if options.gpus == 0 and options.recipe == RECIPE else []


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all parts")
    parser.add_argument("--model", type=Path, help="the model with which the warm-up begins; default: the recipe's own")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument(
        "--runs",
        type=_runs,
        default=tuple(RUNS),
        metavar="RUN,...",
        help=f"of {', '.join(RUNS)}; empty: only the warm-up",
    )
    parser.add_argument("--of", nargs="+", action="append", default=[], metavar=("RUN", "key=value"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--learner-gpus", type=int, default=1, help="unless they are shared")
    parser.add_argument("--workers-per-gpu", type=int, default=4, help="unless they are shared")
    parser.add_argument("--timeout-s", type=float, default=540.0, help="of one part")
    options = parser.parse_intermixed_args()
    if unknown := {name for name, *_ in options.of} - set(RUNS):
        parser.error(f"--of: no run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    if options.steps <= FIRST:
        parser.error(f"--steps {options.steps}: the first {FIRST} do not count")
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    options.model = options.model and options.model.absolute()
    return options


def _runs(text: str) -> Sequence[str]:
    asked = text.split(",") if text else []
    if unknown := set(asked) - set(RUNS):
        raise argparse.ArgumentTypeError(f"no run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
