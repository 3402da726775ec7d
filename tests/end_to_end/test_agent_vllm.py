"""The agent with a tool learns from random weights with vLLM as the engine."""

import pytest

from benchmarks.agents import episodes
from tests.rollout_workers.marks import VLLM

from .records import check_trained, summary
from .terminals import Terminals

pytestmark = [*VLLM, pytest.mark.timeout(1800)]
CHAINS = "{min_operations: 1, max_operations: 2, largest: 99, modulus: 100}"
SHORT = (
    f"prompts.options={CHAINS}",
    *("engine.kind=vllm", "engine.max_concurrent=32", "model.random.config.head_dim=32", "workers.count=1"),
    *(f"stages.0.phases.{phase}.options.task_options={CHAINS}" for phase in (0, 1)),
    *("stages.0.phases.0.max_steps=200", "stages.0.phases.1.options.skip_rate=0.6"),
    *("stages.0.phases.1.options.error_rate=0.0", "optimizer.learning_rate=1.0e-3", "staleness.max_lag=1"),
    *("learner.steps=6", "learner.groups_per_step=4", "evaluation.prompts=128"),
)


def test_an_agent_learns_with_vllm(terminals: Terminals) -> None:
    terminals.open("run", "run", "agent-arithmetic.yaml", *SHORT).succeeds()
    run = terminals.root / "run" / "runs" / "agent-arithmetic"
    check_trained(run, steps=6, trajectories_per_step=32, max_lag=1)
    found = summary(run)
    assert found["eval_before"] < 0.6, found
    assert found["eval_after"] > found["eval_before"] + 0.1, found
    assert episodes(run)["forks_mean"] == 0.0
