"""The benchmark of asynchrony has runs that differ only in their schedule, and responses with a long-tailed length."""

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import asynchrony, gpus
from benchmarks.learns.parts import SECONDS, SFT
from benchmarks.long_tailed import FEWEST_TERMS, MOST_TERMS, LongTailedPrompts, worked_examples
from headway.broker.schema import Trajectory, VersionSpan, WeightVersion
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.events import StepEvent
from headway.deploy.run.record import summarize
from headway.learner.data.prompts.base import Item
from headway.learner.experience.log import ExperienceLog
from headway.rollout_workers.rewards.reasoning_gym import Verifiers
from tests.deploy.runs import bare_metrics, open_record
from tests.learner.batches import group

ROOT = Path(__file__).parents[1]


def recipe_of(part: str, **changes: Any) -> Any:
    """Return the recipe that `headway` reads from the part's command."""
    given = {"recipe": asynchrony.RECIPE, "model": Path("/m"), "output": Path("/o"), "steps": 19, "of": [], "gpus": 4}
    given |= {"overrides": [], "learner_gpus": 1, "workers_per_gpu": 2, **changes}
    command, recipe, *arguments = asynchrony._arguments(part, argparse.Namespace(**given))
    assert command == ("sft" if part == SFT else "run")
    return load_recipe(recipe, [argument for argument in arguments if "=" in argument])


@pytest.mark.parametrize("run", asynchrony.RUNS)
def test_a_run_has_its_lag_and_its_gpus(run: str) -> None:
    recipe = recipe_of(run)
    assert (recipe.run.name, recipe.learner.steps) == (run, 19)
    assert (recipe.staleness.max_lag > 0) == (run == "asynchronous")
    assert recipe.learner.processes == (4 if run == "colocated" else 1)
    if run != "colocated":
        assert recipe.workers.devices == (1, 1, 2, 2, 3, 3)
        assert recipe.workers.count == 6
        assert recipe.engine.options["kv_cache_memory_bytes"] == asynchrony.KV_CACHE_BYTES
    assert recipe.weights.staging == "device"


def test_gpus_are_named_as_they_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert recipe_of("separated", learner_gpus=2).workers.devices == (6, 6, 7, 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(SystemExit, match="4 GPUs are wanted"):
        recipe_of("separated")


def test_all_runs_start_where_the_warm_up_ended() -> None:
    warm_up, run = recipe_of(SFT), recipe_of("separated")
    assert (warm_up.model.path, len(warm_up.warm_up)) == ("/m", 2)
    assert (run.model.path, run.warm_up) == ("/o/sft", ())
    assert recipe_of("separated", overrides=["sft.phases=[]"]).model.path == "/m"


def test_what_is_said_of_one_run_is_not_of_another() -> None:
    said = [["separated", "learner.group_size=4"]]
    of = {run: recipe_of(run, of=said, overrides=["optimizer.learning_rate=1e-5"]) for run in asynchrony.RUNS}
    assert [recipe.learner.group_size for recipe in of.values()] == [16, 4, 16]
    assert {recipe.optimizer.learning_rate for recipe in of.values()} == {1e-5}


def test_a_rehearsal_without_a_model_has_a_toy() -> None:
    toy, rehearsal = (recipe_of(SFT, gpus=0, model=model) for model in (None, Path("/m")))
    assert (toy.prompts.path, toy.model.path, toy.learner.device) == ("arithmetic", "", "cpu")
    assert (rehearsal.prompts.path, rehearsal.model.path, rehearsal.learner.device) == ("chain_sum", "/m", "cpu")


def test_it_is_compared_with_the_better_of_those_that_were_run() -> None:
    speeds = zip(asynchrony.RUNS, (90.0, 30.0, 50.0), strict=True)
    found: dict[str, Any] = {name: {"samples_per_s": speed, "rewards": [0.5]} for name, speed in speeds}
    compared = asynchrony.compared(found)
    assert (compared["times_faster"], compared["target"], compared["met"]) == (1.8, 2.0, False)
    del found["colocated"]
    assert asynchrony.compared(found)["met"]
    assert "met" not in asynchrony.compared({"asynchronous": found["asynchronous"]})


def test_rewards_are_compared_after_equal_samples() -> None:
    rewards = {"asynchronous": [0.1, 0.2, 0.3, 0.4, 0.5], "separated": [0.3, 0.3, 0.6, 0.9]}
    found = {name: {"samples_per_s": 1.0, "rewards": of_run} for name, of_run in rewards.items()}
    assert asynchrony.compared(found)["reward_after_equal_samples"] == {"asynchronous": 0.3, "separated": 0.6}


def test_gpus_count_only_while_the_counted_steps_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_use", lambda names: [50.0, 100.0][: len(names)])
    metrics = tmp_path / "metrics.jsonl"
    utilization = gpus.Utilization(metrics, first=2, steps=4, gpus=2)
    for done in (0, 1, 2, 3, 4):
        metrics.write_text("{}\n" * done)
        utilization.look()
    assert len(utilization.seen) == 2
    assert utilization.mean() == [0.5, 1.0]


def of_length(sample: Trajectory, tokens: int) -> Trajectory:
    return replace(
        sample,
        response_tokens=np.zeros(tokens, np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        spans=(VersionSpan(0, tokens, WeightVersion(1, 0)),),
    )


def write_run(directory: Path, steps: int) -> None:
    """Write the files of a run whose k-th step trained a response of k tokens and one of 10 k."""
    record, log = open_record(directory), ExperienceLog(directory / "experience", 1 << 20)
    for step in range(steps):
        metrics = bare_metrics(incarnation=1, step=step, trajectories=2, step_s=2.0, take_s=0.5)
        record.write(StepEvent(metrics=metrics, tids=()))
        one = group(step, samples=(0, 1))
        lengths = (step + 1, 10 * (step + 1))
        samples = tuple(of_length(sample, n) for sample, n in zip(one.trajectories, lengths, strict=True))
        log.record(step, [replace(one, trajectories=samples)])
    summarize(directory, {})
    (directory / "gpu_use.json").write_text("[0.25, 0.5, 0.75]")


def test_figures_are_of_the_counted_steps(tmp_path: Path) -> None:
    write_run(tmp_path, steps=asynchrony.FIRST + 2)
    one = asynchrony.figures("asynchronous", tmp_path, learner_gpus=1)
    assert one["fewest_workers"] == 1
    assert one["response_tokens"] == {"mean": 63.2, "p50": 61.0, "p95": 118.5, "p99": 119.7, "max": 120}
    assert (one["samples_per_s"], one["learner_waits"], one["engines_idle"]) == (1.0, 0.25, 0.375)
    assert asynchrony.figures("colocated", tmp_path, learner_gpus=1)["engines_idle"] is None


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / SFT).mkdir()
    (tmp_path / SFT / "sft.json").write_text("{}")
    write_run(tmp_path / "separated", steps=asynchrony.FIRST + 1)
    (tmp_path / "separated" / SECONDS).write_text("1")
    command = ("benchmarks.asynchrony", "--gpus", "0", "--output", str(tmp_path), "--runs", "separated")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert (done.returncode, result["failed"], result["separated"]["samples"]) == (0, {}, 2 * (asynchrony.FIRST + 1))


@pytest.mark.parametrize(("failing", "begun"), [(SFT, [SFT]), ("separated", [SFT, *asynchrony.RUNS])])
def test_a_run_that_fails_stops_no_other_and_a_warm_up_that_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str, begun: list[str]
) -> None:
    parts = []

    def finish(arguments: list[str], directory: Path, timeout_s: float) -> None:
        parts.append(directory.name)
        if directory.name == failing:
            raise subprocess.CalledProcessError(1, "headway")
        write_run(directory, steps=asynchrony.FIRST + 1)

    monkeypatch.setattr(asynchrony, "finish", finish)
    monkeypatch.setattr(sys, "argv", ["benchmarks.asynchrony", "--output", str(tmp_path)])
    assert asynchrony.main() == 1
    result = json.loads(capsys.readouterr().out)
    assert (parts, list(result["failed"])) == (begun, [failing])
    assert [run for run in asynchrony.RUNS if run in result] == [run for run in begun[1:] if run != failing]


def terms_of(text: str) -> int:
    """Return the number of terms in a question of `chain_sum`."""
    return len(text.partition(": ")[2].removesuffix(" =").split()) // 2 + 1


def check_long_tailed(terms: list[int]) -> None:
    assert (min(terms), max(terms)) == (FEWEST_TERMS, MOST_TERMS)
    assert np.median(terms) == 4
    assert np.percentile(terms, 99) > 10 * 4


def items(count: int, seed: int = 0, epoch: int = 0) -> list[Item]:
    prompts = LongTailedPrompts(path="chain_sum", seed=seed)
    return [prompts.train(epoch, position) for position in range(count)]


def test_prompts_are_long_tailed_and_the_same_for_the_same_seed() -> None:
    first = items(1000)
    check_long_tailed([terms_of(str(item.content)) for item in first])
    assert items(50) == first[:50]
    backwards = LongTailedPrompts(path="chain_sum", seed=0)
    assert [backwards.train(0, position) for position in reversed(range(50))] == first[:50][::-1]
    for other in (items(50, seed=1), items(50, epoch=1)):
        assert [item.content for item in other] != [item.content for item in first[:50]]


@pytest.mark.parametrize("path", ["chain_sum", "arithmetic"])
def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained(path: str) -> None:
    held_out = LongTailedPrompts(path=path, seed=0).held_out(100)
    assert held_out == LongTailedPrompts(path=path, seed=1).held_out(100)
    prompts, contents = LongTailedPrompts(path=path, seed=0), {item.content for item in held_out}
    assert not contents & {prompts.train(0, position).content for position in range(500)}
    assert not contents & {one.query for one in islice(worked_examples(path=path, seed=0), 500)}
    assert max(len(str(item.content)) for item in held_out) > 4 * min(len(str(item.content)) for item in held_out)


def test_worked_examples_are_as_long_as_their_prompts_and_right() -> None:
    examples = list(islice(worked_examples(path="chain_sum", seed=0), 2000))
    check_long_tailed([terms_of(one.query) for one in examples])
    assert all(one.response.count("\n") == terms_of(one.query) - 1 for one in examples)
    assert examples[:50] == list(islice(worked_examples(path="chain_sum", seed=0), 50))


def test_careless_examples_are_wrong_and_as_long() -> None:
    careful = islice(worked_examples(path="chain_sum", seed=0), 100)
    careless = islice(worked_examples(path="chain_sum", seed=0, error_rate=1.0), 100)
    for one, other in zip(careful, careless, strict=True):
        assert one.query == other.query
        assert one.response != other.response
        assert one.response.count("\n") == other.response.count("\n")


def test_the_reward_knows_the_prompts() -> None:
    for item in items(20):
        assert Verifiers().score("g", item.extra_info, f"work\n<answer>{item.ground_truth}</answer>")[0] == 1
        assert Verifiers().score("g", item.extra_info, "work\n<answer>none</answer>")[0] == 0
