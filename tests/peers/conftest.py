"""The fixture from which tests of the drivers begin."""

from pathlib import Path

import pytest

from benchmarks.peers.race import Race
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.tiny import model_config
from tests.peers.races import race_in


@pytest.fixture
def race(tmp_path: Path) -> Race:
    """Return a race whose model is there."""
    one = race_in(tmp_path, "learner.steps=3", "learner.groups_per_step=4", "optimizer.learning_rate=3e-4")
    load_model(model_config("qwen3_moe")).save_pretrained(one.model)
    load_tokenizer(model_config("qwen3_moe")).save_pretrained(one.model)
    return one
