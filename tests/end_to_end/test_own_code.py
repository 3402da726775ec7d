"""Two ranks train on a user's own rewards and prompts; code of them that hangs or exits costs samples, or the run."""

import json
from typing import Any

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


CONSTANT = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
NOTHING = "no group of the last 3 steps has rewards that differ (their mean is 0), so nothing is trained"


def test_a_reward_that_is_always_the_same_is_told_once_by_the_log_and_the_terminal(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "constant.py").write_text(CONSTANT)
    recipe = write_recipe(
        home, rewards=[{"kind": "constant:compute_score"}], learner={"steps": 4}, workers={"count": 1}
    )
    command = terminals.open("run", "run", recipe)
    command.succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    assert {(line["flat_groups"], line["grad_norm"]) for line in lines(run / "metrics.jsonl")} == {(1.0, 0.0)}
    for said in (command.said, (run / "logs" / "learner.log").read_text()):
        assert " ".join(said.split()).count(NOTHING) == 1, said


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


HANGS = """
import os
import time
from headway.learner.data.prompts.arithmetic import ArithmeticPrompts
from headway.rollout_workers.engines.base import EngineOptionsError

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(600)

def engine(config, model_dir, seed):
    os._exit(0)

def picky_engine(config, model_dir, seed):
    raise EngineOptionsError("engine.options.taste: there is no such option.")

class Prompts(ArithmeticPrompts):
    def __init__(self, path, seed):
        super().__init__({}, seed=seed)
    def train(self, epoch, position):
        if position == 9:
            time.sleep(600)
        return super().train(epoch, position)
"""


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rewards": [{"kind": "hangs:compute_score", "deadline_s": 0.5, "trial": False}]},
            ["reward hangs:compute_score failed twice", "on 3 samples in a row", "Another start would not mend it"],
        ),
        (
            {"prompts": {"kind": "hangs:Prompts", "deadline_s": 0.5, "options": {}}},
            ["prompts.kind=hangs:Prompts: train(0, 9) ran past its deadline of 0.5 s", "The run has been stopped"],
        ),
        (
            {"engine": {"kind": "hangs:engine"}, "workers": {"count": 1, "max_restarts": 0}},
            ["worker-0 exited with code 0 in the midst of its work", "the run has been stopped"],
        ),
        (
            {"engine": {"kind": "hangs:picky_engine"}},
            ["with code 78: engine.options.taste: there is no such option. Another start would not mend it"],
        ),
    ],
)
def test_what_hangs_or_exits_ends_the_run_with_its_name(
    terminals: Terminals, sections: dict[str, Any], words: list[str]
) -> None:
    home = terminals.directory("run")
    (home / "hangs.py").write_text(HANGS)
    command = terminals.open("run", "run", write_recipe(home, **{"workers": {"count": 1}, **sections}))
    assert command.wait() == 1, command.tail()
    said = " ".join(command.said.split())
    for part in words:
        assert part in said
