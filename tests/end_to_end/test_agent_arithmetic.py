"""The shipped recipe of an agent with a tool learns from random weights, over several turns, on CPUs."""

import pytest

from .records import check_trained, summary
from .terminals import Terminals

pytestmark = pytest.mark.slow


def test_an_agent_learns_to_call_its_calculator(terminals: Terminals) -> None:
    terminals.open("run", "run", "agent-arithmetic.yaml").succeeds()
    run = terminals.root / "run" / "runs" / "agent-arithmetic"
    check_trained(run, steps=30, trajectories_per_step=256, max_lag=2)
    found = summary(run)
    assert found["eval_before"] <= 0.45, found
    assert found["eval_after"] >= 0.85, found
