"""`headway run` starts learner, workers and scorers on GPUs of their own, or says which GPU has several, or that there
is none."""

import os
from pathlib import Path

import pytest
import torch

from headway.broker.errors import ConfigError
from headway.deploy.recipe import placement
from headway.deploy.recipe.placement import check_gpus, check_placement, has_gpu
from headway.deploy.recipe.resolve import load_recipe

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


RL = "stages=[{kind: rl}]"
GATED = "stages=[{kind: sft, phases: [{kind: arithmetic, until_pass_rate: 0.5}]}, {kind: rl}]"
OTHER = "workers.pools=[{name: other, engine: {kind: embedded, device: cuda}}]"


@pytest.mark.parametrize(
    ("overrides", "stages", "told"),
    [
        (["learner.device=cuda", "engine.device=cuda"], [0, 1], "learner.device is cuda and engine.device is cuda, bu"),
        (["learner.device=cuda"], [0], "learner.device is cuda, but"),
        ([RL, "engine.device=cuda:1"], [0], "engine.device is cuda:1, but"),
        ([GATED, "engine.kind=vllm", "engine.device=cuda"], [0], "engine.device is cuda, but"),
        ([RL, OTHER], [0], r"workers.pools\[0\].engine.device is cuda, but"),
        ([RL, *SCORED], [0], "scorers.device is cuda, but"),
        ([], [0, 1], ""),
        ([RL, "engine.device=cuda", "engine.kind=vllm"], [0], ""),  # it takes what its process sees, a CPU too
        ([GATED.replace(", until_pass_rate: 0.5", ""), "engine.device=cuda"], [0], ""),
        ([RL, "engine.device=cuda", "workers.count=0", OTHER.replace("cuda", "cpu")], [0], ""),
        ([RL, *SCORED, "scorers.count=0"], [0], ""),
        ([RL, "scorers.device=cuda"], [0], ""),
        ([RL, *SCORED, "scorers.engine.kind=mine:Own"], [0], ""),
        (["learner.device=cuda", "learner.backend=mine:Own"], [0], ""),
        (["learner.device=cuda", "launcher.kind=mine:Own"], [0], ""),  # it starts roles where it likes
        (["learner.device=cuda", "stages=[{kind: 'mine:Own'}, {kind: rl}]"], [0], ""),
    ],
)
def test_only_what_needs_a_gpu_here_is_refused_without_one(
    overrides: list[str], stages: list[int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("arithmetic.yaml", overrides)
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    check_gpus(recipe, stages)
    monkeypatch.setattr(placement, "has_gpu", lambda: False)
    if not told:
        check_gpus(recipe, stages)
        return
    with pytest.raises(ConfigError, match=told):
        check_gpus(recipe, stages)


def test_a_machine_without_a_driver_has_a_gpu_if_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "DRIVERS", ())
    assert has_gpu() == torch.cuda.is_available()
    monkeypatch.setattr(placement, "ASK_TORCH", "import sys; sys.exit(1)")  # who cannot be asked does not say no
    assert has_gpu()
    monkeypatch.setattr(placement, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(placement, "ASK_TORCH", f"import sys; sys.exit({placement.NO_GPU})")
    assert has_gpu()


@pytest.mark.skipif(torch.cuda.is_available() or any(map(os.path.exists, placement.DRIVERS)), reason="there is a GPU")
def test_a_run_that_lacks_a_gpu_starts_nothing_here_and_is_not_refused_elsewhere(tmp_path: Path) -> None:
    lacking = ("run", "arithmetic.yaml", "engine.device=cuda")
    answer = headway(*lacking, cwd=tmp_path)
    assert (answer.returncode, answer.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert answer.stderr.startswith("Error: engine.device is cuda, but torch finds no CUDA device on this machine. ")
    assert headway(*lacking, "--dry-run", cwd=tmp_path).returncode == 0  # its commands may be for another machine
    assert headway("prepare", *lacking[1:], cwd=tmp_path).returncode == 0
