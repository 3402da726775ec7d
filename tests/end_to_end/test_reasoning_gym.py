"""The shipped recipe for reasoning-gym runs, here with a model of random weights over printable ASCII."""

import json
import string

import pytest

from .recipes import MODEL
from .records import check_trained
from .terminals import Terminals

pytestmark = pytest.mark.slow

PRINTABLE = "".join(sorted(set(string.printable)))


def test_the_recipe_runs_on_a_random_model(terminals: Terminals) -> None:
    random = {**MODEL["random"], "alphabet": PRINTABLE}
    overrides = (
        "model.path=''",
        f"model.random={json.dumps(random)}",
        "prompts.system_prompt=''",
        "learner.steps=2",
        "learner.groups_per_step=2",
        "learner.group_size=2",
        "sampling.max_new_tokens=16",
        "engine.max_model_len=128",
        "engine.max_concurrent=8",
        "evaluation.prompts=4",
        "evaluation.every_steps=0",
        "workers.count=1",
    )
    terminals.open("run", "run", "reasoning-gym.yaml", *overrides).succeeds()
    run = terminals.root / "run" / "runs" / "reasoning-gym"
    check_trained(run, steps=2, trajectories_per_step=4, max_lag=2)
