"""max_lag 0 is exactly on-policy: engines hold the learner's weights to the last bit that matters."""

import pytest

from .recipes import write_recipe
from .records import check_trained, lines
from .terminals import Terminals

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_lag_every_ratio_is_one(terminals: Terminals, temperature: float) -> None:
    recipe = write_recipe(
        terminals.directory("run"),
        staleness={"max_lag": 0},
        sampling={"temperature": temperature},
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 4},
        optimizer={"learning_rate": 2e-2},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=0)
    for step in lines(run / "metrics.jsonl"):
        assert step["grad_norm"] > 0 or step["reward_std"] == 0  # the weights changed from step to step
        assert step["algorithm"]["ratio_max_deviation"] <= 1e-4
        assert step["lag_histogram"] == {"0": 16}
        assert step["mixed_version_trajectories"] == 0
