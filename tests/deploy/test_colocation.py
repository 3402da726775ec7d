"""`placement: colocated` puts engines where the learner's ranks are, and decides how they get weights."""

from pathlib import Path

import pytest

from headway.deploy.recipe.placement import worker_gpus
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe

MINIMAL = """
model: {random: {architecture: qwen3, alphabet: "0123456789+"}}
prompts: {kind: arithmetic}
rewards: [{kind: arithmetic}]
"""
ON_GPUS = ("run.placement=colocated", "learner.device=cuda", "engine.kind=vllm")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def colocated(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, [*ON_GPUS, *overrides])


def test_one_key_is_enough(path: Path, tmp_path: Path) -> None:
    recipe = colocated(path, "learner.processes=4")
    weights = recipe.weights
    assert (weights.transport, weights.staging, weights.swaps_at_once) == ("ipc", "host", 1.0)
    assert recipe.workers.count == 4
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    on_a_cpu = load_recipe(path, ["run.placement=colocated"])
    assert (on_a_cpu.weights.transport, on_a_cpu.weights.staging, on_a_cpu.workers.count) == ("gloo", "host", 2)


def test_what_is_said_wins(path: Path) -> None:
    recipe = colocated(
        path, "learner.processes=4", "weights.staging=device", "workers.count=2", "weights.swaps_at_once=.5"
    )
    assert (recipe.weights.staging, recipe.workers.count, recipe.weights.swaps_at_once) == ("device", 2, 0.5)


def test_each_worker_has_the_gpu_of_a_rank_and_sees_where_weights_come_from(path: Path) -> None:
    four = colocated(path, "learner.processes=4", "engine.kind=vllm", "weights.staging=device")
    assert worker_gpus(four, "") == ["0", "1,0", "2,0", "3,0"]
    assert worker_gpus(four, "4,5,6,7") == ["4", "5,4", "6,4", "7,4"]
    assert worker_gpus(colocated(path, "learner.processes=2"), "") == ["0", "1"]


def test_engines_over_several_gpus_have_those_of_several_ranks(path: Path) -> None:
    recipe = colocated(path, "learner.processes=4", "engine.options.tensor_parallel_size=2", "weights.staging=device")
    assert recipe.workers.count == 2
    assert worker_gpus(recipe, "") == ["0,1", "2,3,0"]


def test_elsewhere_devices_are_as_they_are_said(path: Path) -> None:
    assert worker_gpus(
        colocated(path, "learner.processes=2", "workers.devices=[1, 0]", "weights.staging=device"), ""
    ) == ["1,0", "0"]
    assert worker_gpus(load_recipe(path, ["run.placement=colocated"]), "") == []
    assert worker_gpus(load_recipe(path, ["workers.devices=[1, 2]"]), "0,1") == ["1", "2"]


def test_a_separate_worker_sees_the_gpu_from_which_it_copies(path: Path) -> None:
    devices = ("learner.device=cuda", "engine.kind=vllm", "workers.devices=[2, 2, 3]", "weights.staging=device")
    assert worker_gpus(load_recipe(path, [*devices, "weights.transport=ipc"]), "1,2,3") == ["2,1", "2,1", "3,1"]
    assert worker_gpus(load_recipe(path, [*devices, "weights.transport=nccl"]), "1,2,3") == ["2", "2", "3"]


def test_the_shipped_recipe_for_one_gpu_takes_turns_by_one_key() -> None:
    recipe = load_recipe("smollm2-reasoning-gym.yaml", ["run.placement=colocated"])
    assert (recipe.weights.transport, recipe.weights.staging, recipe.workers.count) == ("ipc", "host", 1)
    assert worker_gpus(recipe, "3") == ["3"]
