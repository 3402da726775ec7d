"""Supervised fine-tuning, a reward model, PPO with it: the shipped recipe, killed in each stage and resumed."""

import signal
import time
from pathlib import Path

import pytest

from deploy.recipe.loading import load_recipe
from deploy.roles.evaluation import evaluate_checkpoint

from .records import lineage, summary
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = "sft-rm-ppo.yaml"
STEPS = 25
SHORTER = (f"learner.steps={STEPS}", "checkpoint.every_steps=5", "evaluation.prompts=0")
STAGES = (Path("sft"), Path("stages", "2-reward_model"))
BY_THE_RULE = ("rewards=[{kind: arithmetic}]", "evaluation.pass_reward=1.0")


def test_a_chain_that_is_killed_in_each_stage_ends_with_a_better_policy(terminals: Terminals) -> None:
    whole = terminals.open("whole", "run", RECIPE, "--until", "reward_model")
    run = terminals.directory("killed") / "runs" / "sft-rm-ppo"
    first = terminals.open("killed", "run", RECIPE, *SHORTER)
    _kill(first, run / "sft.metrics.jsonl", 40)
    assert not (run / STAGES[0]).exists()
    second = terminals.open("killed", "run", RECIPE, *SHORTER, "--resume")
    _kill(second, run / "stages" / "2-reward_model.metrics.jsonl", 30)
    assert not (run / STAGES[1]).exists()
    third = terminals.open("killed", "run", RECIPE, *SHORTER, "--resume")
    _kill(third, run / "metrics.jsonl", 8)
    whole.succeeds()
    for stage in STAGES:
        of_whole = whole.directory / "runs" / "sft-rm-ppo" / stage / "model.safetensors"
        assert (run / stage / of_whole.name).read_bytes() == of_whole.read_bytes(), stage
    terminals.open("killed", "run", RECIPE, *SHORTER, "--resume").succeeds()

    steps = lineage(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert {step["incarnation"] for step in steps} == {1, 2}
    found = summary(run)
    assert found["reward_last"] > found["reward_first"] + 0.3
    (last,) = (run / "checkpoints").glob(f"*/step_{STEPS}")
    before, after = (_right(model) for model in (run / "sft", last))
    assert after > before + 0.08, "a policy that only fools the reward model is right no more often"


def _kill(terminal: Terminal, record: Path, steps: int) -> None:
    """SIGKILL to the command once the record has so many steps."""
    deadline = time.monotonic() + DEADLINE_S
    while not record.exists() or len(record.read_text().splitlines()) < steps:
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
    terminal.send(signal.SIGKILL)
    terminal.wait()


def _right(model: Path) -> float:
    """The share of held-out prompts that the model answers rightly, by the task's own rule."""
    return evaluate_checkpoint(load_recipe(RECIPE, BY_THE_RULE), model, None).pass_rate
