"""A run trains with an engine and a transport from outside of this repository, named by import path."""

import pytest

from tests import plugged

from .recipes import write_recipe
from .records import check_trained
from .terminals import Terminals

pytestmark = pytest.mark.slow


def test_a_run_trains_with_an_engine_and_a_transport_of_ones_own(terminals: Terminals) -> None:
    home = terminals.directory("run")
    plugged.write(home)
    recipe = write_recipe(
        home,
        engine={"kind": plugged.ENGINE, "max_concurrent": 8},
        weights={"transport": plugged.TRANSPORT},
        learner={"steps": 3},
        workers={"count": 1},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=3, trajectories_per_step=16, max_lag=2)
    assert list(home.glob("group-*/1.taken1")), "a worker has received a bucket through a file"
    assert f"engine {plugged.ENGINE} is up" in (run / "logs" / "worker-0.log").read_text()
