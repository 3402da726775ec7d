import subprocess
import sys

import msgspec
import pytest

from headway.algorithms.presets import PRESETS
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.objective.composition import check_algorithm, needs_proximal


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_composition_that_fits_together(name: str) -> None:
    config = msgspec.convert({"preset": name, **PRESETS[name].algorithm}, AlgorithmConfig)
    check_algorithm(config)
    assert needs_proximal(config) == (config.objective.anchor == "proximal" and config.proximal == "recompute")
    assert PRESETS[name].source


def test_the_defaults_are_those_of_grpo() -> None:
    assert msgspec.convert(PRESETS["grpo"].algorithm, AlgorithmConfig) == AlgorithmConfig()


def test_presets_are_read_without_torch() -> None:
    code = "import sys, headway.algorithms.presets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
