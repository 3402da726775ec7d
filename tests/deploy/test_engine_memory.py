"""`headway run` divides a GPU among the engines that it places there, where the recipe does not say what each takes."""

import os
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.cli.memory_report import learner_part
from headway.deploy.recipe.placement import check_placement, engine_shares, memory_overrides, only_gpu_bytes
from headway.deploy.recipe.pools import pools_of
from headway.deploy.recipe.resolve import load_recipe, with_overrides
from headway.rollout_workers.engines import abilities_of

from .test_cli import headway

ON_GPUS = ["learner.device=cuda", "engine.kind=vllm", "engine.device=cuda"]
SCORED = ["scorers.device=cuda", "rewards=[{kind: reward_model, path: m}]"]
UTILIZATION = "engine.options.gpu_memory_utilization"


def divided(*overrides: str, visible: str = "") -> dict[str, list[str]]:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, *overrides])
    return memory_overrides(recipe, engine_shares(recipe, visible))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["workers.count=2", "workers.devices=[1,1]"], {"workers": [f"{UTILIZATION}=0.44"]}),
        (["workers.count=4", "workers.devices=[1]"], {"workers": [f"{UTILIZATION}=0.21"]}),
        (["workers.count=4", "workers.devices=[1,1,2,2]"], {"workers": [f"{UTILIZATION}=0.44"]}),
        (["workers.count=3", "workers.devices=[1,2]"], {"workers": [f"{UTILIZATION}=0.44"]}),
        (["workers.count=2", "workers.devices=[1,2]"], {}),
        (["workers.count=1", "workers.devices=[1]"], {}),
        (["workers.count=4", "workers.devices=[1]", f"{UTILIZATION}=0.1"], {}),
        (["workers.count=4", "workers.devices=[1]", f"{UTILIZATION}=null"], {"workers": [f"{UTILIZATION}=0.21"]}),
        (
            ["workers.count=2", "workers.devices=[1]", "engine.options.kv_cache_memory_bytes=1000000000"],
            {"workers": [f"{UTILIZATION}=0.05"]},
        ),
        (
            ["workers.count=2", "workers.devices=['1,2']", "engine.options.tensor_parallel_size=2"],
            {"workers": [f"{UTILIZATION}=0.44"]},
        ),
        (
            ["engine.kind=sglang", "engine.dtype=bfloat16", "workers.count=2", "workers.devices=[1]"],
            {"workers": ["engine.options.mem_fraction_static=0.42"]},
        ),
        (["engine.kind=embedded", "workers.count=2", "workers.devices=[1]"], {}),
        (["run.placement=colocated", "workers.count=1"], {}),
        (["learner.device=cpu", "workers.count=40"], {}),
        (["learner.device=cpu", "workers.count=2", "workers.devices=[0]"], {"workers": [f"{UTILIZATION}=0.44"]}),
    ],
)
def test_engines_of_a_gpu_get_equal_shares(overrides: list[str], expected: dict[str, list[str]]) -> None:
    assert divided(*overrides) == expected


def test_a_pool_that_names_its_share_leaves_the_rest_to_others() -> None:
    pool = "{name: other, count: 1, devices: [1], engine: {options: {gpu_memory_utilization: 0.3}}}"
    assert divided("workers.count=2", "workers.devices=[1]", f"workers.pools=[{pool}]") == {
        "workers": [f"{UTILIZATION}=0.29"]
    }


def test_a_pool_of_another_engine_gets_its_own_option() -> None:
    pool = "{name: other, count: 1, devices: [1], engine: {kind: sglang, dtype: bfloat16, options: {page_size: 1}}}"
    overrides = [*ON_GPUS, "workers.count=1", "workers.devices=[1]", f"workers.pools=[{pool}]"]
    recipe = load_recipe("arithmetic.yaml", overrides)
    given = memory_overrides(recipe, engine_shares(recipe, ""))
    assert given == {"workers": [f"{UTILIZATION}=0.44"], "other": ["engine.options.mem_fraction_static=0.42"]}
    (other,) = pools_of(recipe)
    engine = with_overrides(recipe, [*other.overrides, *given["other"]]).engine
    assert engine.options == {"page_size": 1, "mem_fraction_static": 0.42}


@pytest.mark.parametrize(
    ("part", "overrides", "share"),
    [
        (0.3, ["workers.count=1"], 0.48),
        (0.6, ["workers.count=1"], 0.28),
        (0.3, ["workers.count=3"], 0.14),
        (0.3, ["workers.count=1", "engine.options.kv_cache_memory_bytes=1000000000"], 0.05),
        (0.3, ["workers.count=1", "workers.devices=[0]"], 0.48),
    ],
)
def test_engines_beside_a_learner_get_what_it_leaves(part: float, overrides: list[str], share: float) -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, *overrides])
    shares = engine_shares(recipe, "", lambda gpu: part if gpu == "0" else None)
    assert shares == {"workers": share}
    check_placement(recipe, "", shares)


@pytest.mark.parametrize("overrides", [["weights.transport=nccl"], [f"{UTILIZATION}=0.3"], ["workers.devices=[1]"]])
def test_engines_elsewhere_or_with_a_share_are_left_alone(overrides: list[str]) -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, "workers.count=1", *overrides])
    assert engine_shares(recipe, "", lambda gpu: pytest.fail("nothing asks what the learner takes")) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        ["workers.count=1"],
        ["workers.count=2", "workers.devices=[1]", "scorers.devices=[1]"],
        ["workers.count=2", "engine.options.kv_cache_memory_bytes=1000000000"],
    ],
)
def test_engines_beside_scorers_get_no_share_and_are_refused(overrides: list[str]) -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, *SCORED, *overrides])
    assert engine_shares(recipe, "", lambda gpu: 0.4) == {}
    with pytest.raises(ConfigError, match="workers and scorers on GPU"):
        check_placement(recipe, "")


@pytest.mark.parametrize(
    "overrides",
    [
        ["workers.count=3", "workers.devices=[1,1,2]", *SCORED, "scorers.devices=[2]"],
        ["workers.count=3", "workers.devices=[1,1,0]"],
    ],
)
def test_a_pool_with_one_engine_where_none_gets_a_share_is_refused_as_a_whole(overrides: list[str]) -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, *overrides])
    shares = engine_shares(recipe, "")
    assert shares == {}
    with pytest.raises(ConfigError, match="would start"):
        check_placement(recipe, "", shares)


def test_a_learner_that_leaves_too_little_is_named() -> None:
    recipe = load_recipe("arithmetic.yaml", [*ON_GPUS, "workers.count=2"])
    complaint = r"2 engines on GPU 0 beside a learner that leaves them 0\.10 of it, and 2 of them .* other GPUs"
    with pytest.raises(ConfigError, match=complaint):
        engine_shares(recipe, "", lambda gpu: 0.8)


def pretend_gpus(directory: Path, monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """Have nvidia-smi tell of GPUs of these sizes."""
    asked = directory / "bin" / "nvidia-smi"
    asked.parent.mkdir(exist_ok=True)
    asked.write_text("#!/bin/sh\n" + "".join(f"echo {size}\n" for size in mebibytes))
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(asked.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("sizes", "visible", "mebibytes"),
    [
        ([80000], "", 80000),
        ([80000], "0", 80000),
        ([80000] * 8, "3", 80000),
        ([80000] * 8, "GPU-3f", 80000),
        ([80000] * 8, "", None),
        ([80000] * 8, "3,4", None),
        ([80000, 24000], "0", None),
        ([80000], "MIG-3f", None),
        ([80000], "-1", None),
        ([80000], "NoDevFiles", None),
        ([], "", None),
    ],
)
def test_the_memory_of_the_only_gpu_is_known(
    sizes: list[int], visible: str, mebibytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(tmp_path, monkeypatch, *sizes)
    assert only_gpu_bytes(visible) == (mebibytes and mebibytes << 20)


def test_a_learner_that_is_not_planned_has_no_known_part() -> None:
    assert learner_part(load_recipe("arithmetic.yaml", ["learner.backend=mine:Backend"]), 80000 << 20) is None
    assert learner_part(load_recipe("dpo.yaml"), 80000 << 20) is None


def test_a_run_that_sees_several_gpus_does_not_put_all_on_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(tmp_path, monkeypatch, 80000, 80000)
    sized = ["workers.count=2", "engine.options.kv_cache_memory_bytes=1000000000"]
    answer = headway("run", "arithmetic.yaml", *ON_GPUS, *sized, "--dry-run", cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: `headway run` would start learner and workers on GPU 0 (")


def test_a_run_on_one_gpu_asks_how_much_memory_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(tmp_path, monkeypatch, 80000)
    shown = headway("run", "arithmetic.yaml", *ON_GPUS, "workers.count=1", "--dry-run", cwd=tmp_path)
    assert f" {UTILIZATION}=0.48)" in shown.stdout, shown.stderr


def test_a_stored_share_is_taken() -> None:
    for kind in ("vllm", "sglang"):
        abilities = abilities_of(load_recipe("arithmetic.yaml", [f"engine.kind={kind}"]).engine)
        assert abilities.takes_stored(abilities.memory_option, 0.42)


def test_too_many_engines_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"16 engines on GPU 1, .* 0\.05 .* workers\.devices"):
        divided("workers.count=16", "workers.devices=[1]")
    answer = headway("run", "arithmetic.yaml", *ON_GPUS, "workers.count=16", "workers.devices=[1]", cwd=tmp_path)
    assert (answer.returncode, answer.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert answer.stderr.startswith("Error: `headway run` would start 16 engines on GPU 1")


def test_the_commands_of_workers_have_their_share(tmp_path: Path) -> None:
    devices = ["workers.count=2", "workers.devices=[1,1]"]
    shown = headway("run", "arithmetic.yaml", *ON_GPUS, *devices, "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    workers = [line for line in shown.stdout.splitlines() if "--name worker-" in line]
    assert [line.endswith(f" {UTILIZATION}=0.44)") for line in workers] == [True, True]
