"""What is not installed is said before the warm-up, and only to those who need it."""

import sys

import pytest

from broker.errors import ConfigError
from deploy.recipe.loading import load_recipe
from deploy.recipe.packages import check_packages


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without extras."""
    for module in ("vllm", "megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("bare")
def test_a_learner_needs_megatron_and_no_vllm() -> None:
    check_packages(load_recipe("arithmetic.yaml"), has_workers=True)
    check_packages(load_recipe("arithmetic-vllm.yaml"), has_workers=False)
    with pytest.raises(ConfigError, match=r"engine\.kind=vllm needs vLLM, which is not installed\. On CPUs: pip"):
        check_packages(load_recipe("arithmetic-vllm.yaml"), has_workers=True)
    with pytest.raises(ConfigError, match=r"needs Megatron Core, which is not installed\. pip install"):
        check_packages(load_recipe("arithmetic-megatron.yaml"), has_workers=False)
