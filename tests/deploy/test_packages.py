"""Headway names a missing package before the warm-up, and only to users who need it."""

import sys
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.recipe.preflight import check_packages
from headway.deploy.recipe.resolve import load_recipe

from .runs import sink_run


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Headway is installed without extras."""
    for module in ("vllm", "megatron", "megatron.core", "tensorboard"):
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
