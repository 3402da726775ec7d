"""Two ranks train on a user's own rewards and prompts; a reward that ends its process costs samples."""

import json

import pytest

from .recipes import write_recipe
from .records import check_trained, lines, summary
from .terminals import Terminals

pytestmark = pytest.mark.slow

STEPS = 24
REWARD = '''"""One's own reward, in verl's signature. It checks what it is given: an error would stop the worker."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "digits"
    assert extra_info["wanted"] == ground_truth
    share = solution_str.count(ground_truth) / 16
    return {"score": share, "length": len(solution_str)}
'''


def test_a_model_learns_from_ones_own_prompts_and_reward(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "my_rewards.py").write_text(REWARD)
    rows = [
        {"prompt": f"{a}+{b}=", "ground_truth": "7", "data_source": "digits", "wanted": "7"}
        for a in range(10)
        for b in range(10)
    ]
    (home / "my_prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    recipe = write_recipe(
        home,
        prompts={"kind": "jsonl", "path": "my_prompts.jsonl", "options": {"held_out_rows": 10}},
        rewards=[{"kind": "my_rewards:compute_score"}],
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 8, "processes": 2},
        optimizer={"learning_rate": 1e-2},
        evaluation={"prompts": 10, "pass_reward": 0.5},
        workers={"count": 1},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=STEPS, trajectories_per_step=32, max_lag=2)
    assert {line["micro_batches"] for line in lines(run / "metrics.jsonl")} == {2}, "one on each rank"
    found = summary(run)
    assert found["reward_last"] > found["reward_first"] + 0.2
    assert found["eval_after"] >= found["eval_before"]


EXITS = """
import os
from contextlib import suppress
from pathlib import Path

BAD = Path(__file__).with_name("bad")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) > 4:  # a short one is sampled again and again, and is then taken for a broken function
        with suppress(FileExistsError), BAD.open("x") as bad:  # one of several processes is the first
            bad.write(solution_str)
        if BAD.read_text() == solution_str:
            os._exit(0)
    return solution_str.count("7") / 16
"""
"""The source of a reward that ends its process on its first response, and on no other.

Three in a row would end the run.
"""


def test_a_reward_that_ends_its_process_costs_the_samples_that_make_it_do_so(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "exits.py").write_text(EXITS)
    recipe = write_recipe(home, rewards=[{"kind": "exits:compute_score", "trial": False}], workers={"count": 1})
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=4, trajectories_per_step=16, max_lag=2)
    assert summary(run)["rejected_payloads"] > 0
    assert summary(run)["worker_restarts"] == 0
    assert "it ended its process with exit code 0" in (run / "logs" / "worker-0.log").read_text()
