"""A run trains with an engine and a transport from outside of this repository, named by import path."""

import pytest

from headway.learner.config import ModelConfig, RandomModelConfig
from tests import plugged
from tests.learner.adapted import saved_base

from .recipes import write_recipe
from .records import check_trained
from .terminals import Terminals
from .test_sglang_adapter import DENSE

pytestmark = pytest.mark.slow


def test_a_run_trains_with_an_engine_and_a_transport_of_ones_own(terminals: Terminals) -> None:
    home = terminals.directory("run")
    plugged.write(home)
    recipe = write_recipe(
        home,
        engine={"kind": plugged.ENGINE, "max_concurrent": None},
        weights={"transport": plugged.TRANSPORT},
        learner={"steps": 3},
        workers={"count": 1},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=3, trajectories_per_step=16, max_lag=2)
    assert list(home.glob("group-*/1.taken1")), "a worker has received a bucket through a file"
    log = (run / "logs" / "worker-0.log").read_text()
    assert f"engine {plugged.ENGINE} is up" in log
    assert "takes up to 48 samples at a time: its engine batches 64" in log, "it has all of three steps"


def test_a_run_sends_an_engine_of_ones_own_the_adapter_alone(terminals: Terminals) -> None:
    base = saved_base(ModelConfig(random=RandomModelConfig(**DENSE)), terminals.root / "base")
    home = terminals.directory("run")
    plugged.write(home)
    recipe = write_recipe(
        home,
        model={"path": base.path, "adapter": {"rank": 4, "alpha": 8}, "random": None},
        engine={"kind": plugged.ADAPTED_ENGINE, "max_concurrent": 8},
        weights={"adapter": "alone"},
        learner={"steps": 3},
        optimizer={"learning_rate": 2e-2},
        workers={"count": 1},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = home / "runs" / "tiny"
    check_trained(run, steps=3, trajectories_per_step=16, max_lag=2)
    assert "the adapter merged" not in (run / "logs" / "learner.log").read_text(), "it says why it sends whole weights"
    assert "holds the base of adapters" in (run / "logs" / "worker-0.log").read_text()
