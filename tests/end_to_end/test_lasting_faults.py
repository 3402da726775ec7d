"""A fault that no other start mends ends a run at once, with its words and nothing trained."""

from pathlib import Path

import pytest

from .recipes import DENSE, write_recipe
from .terminals import Terminals

pytestmark = pytest.mark.slow

SOURCE = '''
"""Engines of one's own that do not fit the run."""

from headway.broker.errors import ConfigError, ForeignWeightsError
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.rollout_workers.engines.embedded.embedded_engine import EmbeddedEngine, open_embedded

ABILITIES = EngineAbilities()


class Refusing:
    abilities = ABILITIES

    def __init__(self, config, model_dir, *, seed):
        raise ConfigError("no such kernel here")


def opened(config, model_dir, seed):
    return open_embedded(EngineConfig(max_concurrent=8, max_model_len=48), model_dir, seed=seed)


class Foreign(EmbeddedEngine):
    abilities = ABILITIES

    def __init__(self, config, model_dir, *, seed):
        self.__dict__ = opened(config, model_dir, seed).__dict__

    async def swap_weights(self, *args, **kwargs):
        raise ForeignWeightsError("this model has no parameter of that name")


class Rotated(EmbeddedEngine):
    """Holds the same weights, and rotates positions otherwise."""

    abilities = ABILITIES

    def __init__(self, config, model_dir, *, seed):
        self.__dict__ = opened(config, model_dir, seed).__dict__
        for part in self._decoder.model.modules():
            if hasattr(part, "inv_freq"):
                part.inv_freq.mul_(3)
'''


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("Refusing", "no such kernel here"),
        ("Foreign", "no parameter of that name"),
        ("Rotated", "Nothing was trained"),
    ],
)
def test_a_fault_that_no_other_start_mends_ends_the_run(terminals: Terminals, engine: str, words: str) -> None:
    home = terminals.directory("run")
    Path(home, "mine.py").write_text(SOURCE)
    recipe = write_recipe(
        home,
        model=DENSE,
        engine={"kind": f"mine:{engine}"},
        workers={"count": 1, "probe_swaps": False},
        learner={"steps": 2},
    )
    terminal = terminals.open("run", "run", recipe)
    terminals.expect_failure(terminal)
    assert terminal.wait() == 1
    said = " ".join(terminal.said.split())
    assert words in said
    assert "Restarting" not in said
    assert "This is a bug" not in said
    trained = terminals.root / "run" / "runs" / "tiny" / "trained.jsonl"
    assert not trained.exists() or not trained.read_text()
