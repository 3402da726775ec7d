"""`headway run` starts learner, workers and scorers on GPUs of their own, or says which GPU has several."""

from pathlib import Path

import pytest

from broker.errors import ConfigError
from deploy.recipe.loading import load_recipe
from deploy.recipe.placement import check_placement

from .test_cli import headway

ON_GPUS = ["learner.device=cuda", "engine.kind=vllm", "engine.device=cuda"]
SCORED = ["scorers.device=cuda", "rewards=[{kind: reward_model, path: m}]"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["workers.devices=[1]", "learner.processes=2"],
            r"learner and workers on GPU 1 \(learner.processes=2; workers",
        ),
        ([], r"learner and workers on GPU 0 \(learner.processes=1; no workers.devices\)"),
        ([*SCORED, "workers.devices=[1]"], r"learner and scorers on GPU 0 \(learner.processes=1; no scorers.devices\)"),
        (
            [*SCORED, "workers.devices=[1, 2]", "scorers.devices=[2]"],
            r"workers and scorers on GPU 2 \(workers.devices=\[1, 2\]; scorers.devices=\[2\]\)",
        ),
        (
            ["workers.devices=[1]", "workers.pools=[{name: other, devices: [0]}]"],
            r"learner and workers on GPU 0 \(learner.processes=1; workers.pools\[0\].devices=\[0\]\)",
        ),
        (["engine.options.tensor_parallel_size=2", "workers.devices=[1, 0]", "workers.count=1"], "workers on GPU 0 "),
        (["workers.devices=[0]", "engine.options.gpu_memory_utilization=0.3"], "workers on GPU 0 "),
        (["workers.devices=[0]", "engine.options.gpu_memory_utilization=null"], "workers on GPU 0 "),
        (
            ["workers.count=1", "weights.transport=nccl", "engine.options.gpu_memory_utilization=0.3"],
            "weights.transport is gloo or ipc",
        ),
    ],
)
def test_roles_on_one_gpu_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_placement(load_recipe("arithmetic.yaml", [*ON_GPUS, *overrides]), "")


@pytest.mark.parametrize(
    "overrides",
    [
        ["workers.devices=[1, 2]"],
        [*SCORED, "workers.devices=[1, 2]", "scorers.devices=[3]"],
        [*SCORED, "scorers.devices=[0]", "scorers.count=0", "workers.devices=[1]"],
        [*SCORED, "scorers.device=cpu", "scorers.devices=[0]", "workers.devices=[1]"],
        ["run.placement=colocated", "workers.count=1"],
        ["workers.count=1", "engine.options.gpu_memory_utilization=0.3"],
        ["workers.count=0", "workers.devices=[0]", "workers.pools=[{name: other, devices: [1]}]"],
        ["learner.device=cpu"],
        ["engine.kind=embedded"],
    ],
)
def test_other_placements_are_left_alone(overrides: list[str]) -> None:
    check_placement(load_recipe("arithmetic.yaml", [*ON_GPUS, *overrides]), "")


def test_the_learner_has_the_first_gpus_that_are_visible() -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, "workers.devices=[0, 1]"])
    check_placement(recipe, "4,5")
    with pytest.raises(ConfigError, match="learner and workers on GPU 1 "):
        check_placement(recipe, "1,5")


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_a_run_is_refused_before_anything_is_written(option: tuple[str, ...], tmp_path: Path) -> None:
    answer = headway("run", "arithmetic.yaml", *ON_GPUS, "weights.transport=nccl", *option, cwd=tmp_path)
    assert (answer.returncode, answer.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert answer.stderr.startswith("Error: `headway run` would start learner and workers on GPU 0 (")


def test_a_part_of_a_run_without_workers_is_not_refused(tmp_path: Path) -> None:
    answer = headway("run", "arithmetic.yaml", *ON_GPUS, "--until", "sft", "--dry-run", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
