"""The benchmark of asynchrony: its runs differ in nothing but when who works where."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import asynchrony
from deploy.config import load_recipe


def recipe_of(run: str, **changes: Any) -> Any:
    """As `headway run` reads the run's command."""
    given = {"recipe": asynchrony.RECIPE, "model": Path("/m"), "output": Path("/o"), "steps": 9, "of": [], "gpus": 4}
    given |= {"overrides": [], "learner_gpus": 1, "workers_per_gpu": 2, **changes}
    command, recipe, *arguments = asynchrony._arguments(run, argparse.Namespace(**given))
    assert command == "run"
    return load_recipe(recipe, [argument for argument in arguments if "=" in argument])


@pytest.mark.parametrize("run", asynchrony.RUNS)
def test_a_run_has_its_lag_and_its_gpus(run: str) -> None:
    recipe = recipe_of(run)
    assert (recipe.run.name, recipe.learner.steps, recipe.model.path) == (run, 9, "/m")
    assert (recipe.staleness.max_lag > 0) == (run == "asynchronous")
    assert recipe.learner.processes == (4 if run == "colocated" else 1)
    if run != "colocated":
        assert recipe.workers.devices == (1, 1, 2, 2, 3, 3)
        assert recipe.workers.count == 6
        assert recipe.engine.options["gpu_memory_utilization"] == 0.4


def test_what_is_said_of_one_run_is_not_of_another() -> None:
    said = [["separated", "learner.group_size=4"]]
    of = {run: recipe_of(run, of=said, overrides=["optimizer.learning_rate=1e-5"]) for run in asynchrony.RUNS}
    assert [recipe.learner.group_size for recipe in of.values()] == [16, 4, 16]
    assert {recipe.optimizer.learning_rate for recipe in of.values()} == {1e-5}


def test_it_is_compared_with_the_better_of_those_that_were_run() -> None:
    found = {name: {"samples_per_s": speed} for name, speed in zip(asynchrony.RUNS, (90.0, 30.0, 50.0), strict=True)}
    assert asynchrony.compared(found) == {"times_faster": 1.8, "target": 2.0, "met": False}
    del found["colocated"]
    assert asynchrony.compared(found)["met"]
    assert asynchrony.compared({"asynchronous": found["asynchronous"]}) == {}


def test_gpus_count_only_while_the_counted_steps_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchrony, "gpu_use", lambda: [50.0, 100.0])
    metrics = tmp_path / "metrics.jsonl"
    utilization = asynchrony.Utilization(metrics, steps=4)
    for done in (0, 1, 2, 3, 4):
        metrics.write_text("{}\n" * done)
        utilization.look()
    assert len(utilization.seen) == 2
    assert utilization.mean() == [0.5, 1.0]
