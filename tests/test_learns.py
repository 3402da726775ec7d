"""The benchmark of a pretrained model that learns: the commands that it starts, and its reading of a run's files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import Qwen3Config

from benchmarks.learns import figures
from benchmarks.learns.apart import APART, HELD, MIXED, OWN, SGLANG, Pools, pool_of
from benchmarks.learns.parts import CONTROL, PARTS, SECONDS, SFT, Study
from headway.deploy.recipe.adapter_support import rank_for_worker
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.directory import EXPERIENCE
from headway.deploy.run.events import StepEvent
from headway.deploy.run.record import summarize
from headway.learner.experience.log import ExperienceLog
from tests.deploy.runs import bare_metrics, evaluation, open_record
from tests.learner.batches import group

ROOT = Path(__file__).parents[1]
RECIPE = "smollm2-reasoning-gym.yaml"


def study(output: Path, **changes: Any) -> Study:
    given = {
        "recipe": RECIPE,
        "model": Path("/models/m"),
        "overrides": (),
        "control_steps": 3,
        "timeout_s": 60.0,
        "learner_gpus": 1,
    }
    return Study(output=output, **{**given, "gpus": 1, **changes})


def recipe_of(part: str, output: Path, **changes: Any) -> Any:
    """Return the recipe that `headway` reads from the part's command."""
    command, recipe, *arguments = study(output, **changes)._arguments(part)
    assert command == ("sft" if part == SFT else "learner" if part in APART else "run")
    return load_recipe(recipe, [argument for argument in arguments if "=" in argument])


def test_runs_differ_in_their_algorithm_alone(tmp_path: Path) -> None:
    overrides = ("learner.steps=7", "sft.phases[0].max_steps=5", "optimizer.learning_rate=3e-5")
    recipes = {part: recipe_of(part, tmp_path, overrides=overrides) for part in PARTS}
    assert (recipes[SFT].model.path, recipes[SFT].warm_up[0].max_steps) == ("/models/m", 5)
    for part in ("grpo", "gspo", CONTROL):
        one = recipes[part]
        assert (one.model.path, one.warm_up) == (str(tmp_path / SFT), ())
        assert one.run_directory == tmp_path / part
        assert [correction.kind for correction in one.algorithm.corrections] == ["truncated_is"]
        assert one.staleness == recipes[SFT].staleness
    assert [recipes[part].algorithm.objective.kind for part in PARTS[1:]] == ["ppo_clip", "gspo", "ppo_clip"]
    assert [recipes[part].optimizer.learning_rate for part in PARTS[1:]] == [3e-5, 3e-5, 0]
    assert [recipes[part].learner.steps for part in PARTS[1:]] == [7, 7, 3]


@pytest.mark.parametrize(("gpus", "devices", "engine"), [(0, (), "embedded"), (1, (), "vllm"), (4, (1, 2, 3), "vllm")])
def test_workers_go_where_the_learner_is_not(tmp_path: Path, gpus: int, devices: tuple[int], engine: str) -> None:
    recipe = recipe_of("gspo", tmp_path, gpus=gpus)
    assert (recipe.workers.devices, recipe.engine.kind) == (devices, engine)
    assert recipe.learner.device == recipe.engine.device == ("cuda" if gpus else "cpu")
    assert recipe.workers.count == max(1, len(devices))


def test_a_learner_of_two_gpus_leaves_the_others_to_workers(tmp_path: Path) -> None:
    on_gpus = ("learner.device=cuda", "engine.kind=vllm", "engine.device=cuda", "weights.transport=nccl")
    changes = {"recipe": "arithmetic-megatron.yaml", "model": None, "gpus": 4, "learner_gpus": 2, "overrides": on_gpus}
    warm_up, run = (recipe_of(part, tmp_path, **changes) for part in (SFT, "grpo"))
    assert warm_up.model.random is not None
    assert (run.model.path, run.warm_up) == (str(tmp_path / SFT), ())
    assert (run.learner.processes, run.learner.layout.expert) == (2, 2)
    assert (run.workers.devices, run.workers.count) == ((2, 3), 2)


@pytest.mark.parametrize("part", APART)
def test_parts_apart_are_grpo_with_the_recipes_engine_and_no_nccl(tmp_path: Path, part: str) -> None:
    recipe = recipe_of(part, tmp_path, gpus=2)
    assert (recipe.algorithm, recipe.engine.kind) == (recipe_of("grpo", tmp_path, gpus=2).algorithm, "vllm")
    assert (recipe.model.path, recipe.warm_up, recipe.weights.transport) == (str(tmp_path / SFT), (), "ipc")
    assert recipe_of(part, tmp_path, gpus=0).weights.transport == "gloo"


@pytest.mark.parametrize("part", [*APART, "grpo"])
def test_an_adapter_is_sent_alone_to_the_workers_of_all_pools(tmp_path: Path, part: str) -> None:
    adapter = "model.adapter={rank: 16, alpha: 32, stages: [rl]}"
    recipe = recipe_of(part, tmp_path, gpus=2, overrides=(adapter,))
    for kind in ("vllm", "sglang"):
        assert rank_for_worker(recipe, replace(recipe.engine, kind=kind), Qwen3Config()) == 16


def test_a_pool_has_its_own_python_environment_and_overrides() -> None:
    pools = Pools(
        sglang=("PYTHONPATH=/s", "/s/python"), of_own=("engine.max_concurrent=1",), of_sglang=("engine.seed=2",)
    )
    deploy = ["-m", "headway", "workers", "--pool"]
    assert pools.command(SGLANG, ["1"]) == [
        *("env", "PYTHONPATH=/s", "/s/python", *deploy, SGLANG),
        *("engine.kind=sglang", "workers.devices=[1]", "engine.seed=2"),
    ]
    assert pools.command(OWN, []) == ["env", sys.executable, *deploy, OWN, "engine.max_concurrent=1"]
    assert pool_of("a-host-of-mine-sglang-0-1f2e") == SGLANG


def write_run(directory: Path, *, before: float, after: float, clip_fraction: float, max_lag: int = 2) -> None:
    """Write the files of a run of three steps; a resumed learner trained the second step again."""
    record = open_record(directory)
    record.write(evaluation(1, 0, before))
    for incarnation, step, lag in ((1, 0, 0), (1, 1, 9), (2, 1, 1), (2, 2, max_lag)):
        metrics = bare_metrics(
            incarnation=incarnation,
            step=step,
            trajectories=8,
            step_s=2.0,
            lag_max=lag,
            algorithm={"clip_fraction": clip_fraction * (step + 1), "ess": 0.5},
            grad_norm=None if step == 2 else 1.0,
            response_tokens_mean=10.0 * (step + 1),
        )
        record.write(StepEvent(metrics=metrics, tids=(f"g{step}:0:0",)))
    record.write(evaluation(2, 3, after))
    summarize(directory, {"max_lag_allowed": 2})
    (directory / SECONDS).write_text("100.5")


def test_a_runs_files_become_figures(tmp_path: Path) -> None:
    write_run(tmp_path, before=0.25, after=0.5, clip_fraction=0.01)
    one = figures.of_run(tmp_path)
    assert (one["pass_rate_before"], one["pass_rate_after"], one["gain"]) == (0.25, 0.5, 0.25)
    assert (one["steps"], one["training_seconds"], one["samples_per_s"], one["seconds"]) == (3, 6.0, 4.0, 100.5)
    assert (one["clip_fraction"], one["ess"], one["mask_fraction"]) == (0.02, 0.5, None)
    assert (one["max_lag"], one["max_lag_allowed"], one["trained_twice"], one["skipped_updates"]) == (2, 2, 0, 1)
    assert one["response_tokens"] == [10.0, 30.0]


def test_targets_are_met_or_missed(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo", before=0.25, after=0.5, clip_fraction=0.001)
    write_run(tmp_path / "gspo", before=0.25, after=0.3, clip_fraction=0.15)
    write_run(tmp_path / CONTROL, before=0.25, after=0.24, clip_fraction=0, max_lag=3)
    found = {part: figures.of_run(tmp_path / part) for part in PARTS[1:]}
    compared = figures.compared(found)
    assert compared["clip_fraction_gspo_over_grpo"] == 150
    assert list(compared["met"].values()) == [True, False, True, False, True]
    assert (
        figures.compared({"grpo": found["grpo"] | {"seconds": 361.0}})["met"]["grpo gains 0.15 in 6 minutes"] is False
    )
    assert figures.compared({CONTROL: found[CONTROL] | {"gain": -0.1}})["met"]["control stays"] is False


def test_each_pools_trained_samples_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, before=0.25, after=0.5, clip_fraction=0.01)
    (tmp_path / HELD).write_text("1.5")
    log = ExperienceLog(tmp_path / EXPERIENCE, 1 << 20)
    for step, workers in enumerate(["host-own-0-aa", "host-own-1-bb", "host-sglang-0-cc"]):
        made = group(1, (0, 1), step=max(0, step - 1))
        named = tuple(replace(one, worker=workers, reward=float(step)) for one in made.trajectories)
        log.record(step, [replace(made, trajectories=named)])
    one = figures.of_apart(tmp_path)
    assert one["held_seconds"] == 1.5
    assert one["pools"] == {
        OWN: {"samples": 4, "reward": 0.5, "lag_mean": 0.5, "lag_max": 1},
        SGLANG: {"samples": 2, "reward": 2.0, "lag_mean": 1.0, "lag_max": 1},
    }
    grpo = figures.of_run(tmp_path)
    met = figures.compared({"grpo": grpo, SGLANG: one, MIXED: one | {"pass_rate_after": 0.4}})["met"]
    assert met[f"{MIXED} trains samples of all its pools"]
    assert not met[f"{SGLANG} trains samples of all its pools"]
    assert met[f"{SGLANG} ends as grpo does"]
    assert not met[f"{MIXED} ends as grpo does"]


def test_what_has_ended_is_not_run_again_and_what_fails_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo", before=0.25, after=0.5, clip_fraction=0.001)
    command = ("benchmarks.learns", "--model", "/nowhere", "--output", str(tmp_path), "--recipe", "nowhere")
    done = subprocess.run(
        [sys.executable, "-m", *command, "--parts", "gspo,grpo"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    result = json.loads(done.stdout)
    assert (done.returncode, list(result["failed"]), result["grpo"]["gain"]) == (1, ["gspo"], 0.25)
    assert "There is no recipe 'nowhere'" in done.stderr
