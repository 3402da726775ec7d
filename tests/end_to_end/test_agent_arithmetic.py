"""The shipped recipe of an agent with a tool learns from random weights, over several turns, on CPUs. Its model plays
and trains as well through unchanged clients of OpenAI's and Anthropic's."""

import shutil
from pathlib import Path

import pytest

from benchmarks.agents import episodes

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
    shutil.copy(Path(__file__).with_name("client_agents.py"), terminals.directory("clients"))
    warm = (f"model.path={run / 'sft'}", "model.random=null", "stages=[{kind: rl}]", "agent.options={}")
    for client in ("openai", "anthropic"):
        own = (f"agent.kind=client_agents:with_{client}", f"run.name={client}", "learner.steps=3")
        terminals.open("clients", "run", "agent-arithmetic.yaml", *warm, *own, "evaluation.prompts=0").succeeds()
        run = terminals.root / "clients" / "runs" / client
        found, played = summary(run), episodes(run)
        assert found["reward_first"] > 0.2, "as good as the warm model was, through another client"
        assert (played["forks_mean"], found["trained_twice"]) == (0.0, 0)
        assert played["turns_mean"] > 2
