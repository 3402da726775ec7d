"""Headway names a missing package before the warm-up, and only to users who need it."""

import sys
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.recipe.preflight import check_packages
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.record import plot
from headway.learner.config import SftPhaseConfig
from headway.learner.data.examples import open_examples
from headway.learner.data.prompts import open_source
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards import open_reward

from .runs import sink_run


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Headway is installed without extras."""
    for module in ("vllm", "megatron", "megatron.core", "tensorboard", "matplotlib", "textual", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("bare")
def test_a_learner_needs_megatron_and_no_vllm() -> None:
    check_packages(load_recipe("arithmetic.yaml"), has_workers=True)
    check_packages(load_recipe("arithmetic-vllm.yaml"), has_workers=False)
    with pytest.raises(ConfigError, match=r"engine\.kind=vllm needs vLLM, which is not installed\. On CPUs: pip"):
        check_packages(load_recipe("arithmetic-vllm.yaml"), has_workers=True)
    with pytest.raises(ConfigError, match=r"needs Megatron Core, which is not installed\. pip install"):
        check_packages(load_recipe("arithmetic-megatron.yaml"), has_workers=False)


@pytest.mark.usefixtures("bare")
def test_a_learner_that_writes_curves_needs_tensorboard() -> None:
    recipe = load_recipe("arithmetic.yaml", ["metrics=[{kind: jsonl}, {kind: tensorboard}]"])
    words = r"metrics\[1\]\.kind=tensorboard needs tensorboard, which is not installed\. pip install 'headway\[tensorb"
    with pytest.raises(ConfigError, match=words):
        check_packages(recipe, has_workers=False)
    with pytest.raises(ConfigError, match=words):
        open_sinks(recipe.metrics, sink_run(Path("nowhere")))


@pytest.mark.usefixtures("bare")
def test_who_uses_tasks_of_reasoning_gym_is_told_its_extra() -> None:
    words = r"=reasoning_gym needs reasoning-gym, which is not installed\. pip install 'headway\[reasoning-gym\]'"
    recipe = load_recipe("reasoning-gym.yaml", ["model.path=/nowhere", "prompts.path=chain_sum"])
    check_packages(recipe, has_workers=False)
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.kind" + words):
        check_packages(recipe, has_workers=True)
    with pytest.raises(ConfigError, match=r"prompts\.kind" + words):
        open_source(recipe.prompts, 0)
    with pytest.raises(ConfigError, match=r"a phase of kind reasoning_gym needs reasoning-gym"):
        open_examples(SftPhaseConfig(kind="reasoning_gym", path="chain_sum"), 0)


@pytest.mark.usefixtures("bare")
async def test_a_worker_without_reasoning_gym_opens_no_reward_of_its() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.kind=reasoning_gym needs reasoning-gym"):
        await open_reward([RewardConfig(kind="reasoning_gym")])


@pytest.mark.usefixtures("bare")
def test_a_run_without_matplotlib_has_no_plot_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert plot(tmp_path) is None
    assert "pip install 'headway[plots]'" in caplog.text
