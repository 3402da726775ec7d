"""`headway run` with a reward model starts the scorer, and starts it again when it is killed.

The run trains the pairs that the model alone chooses.
"""

import os
import signal
from pathlib import Path

import pytest

from headway.broker.schema import Trajectory
from headway.learner.experience.log import ExperienceLog
from tests.rollout_workers.reward_models import save_model, score_of

from .recipes import write_recipe
from .records import check_trained, lines
from .terminals import Terminals
from .watching import attached

pytestmark = pytest.mark.slow

STEPS = 4
LOG = Path("logs", "scorer-reward_model-0.log")


def test_a_reward_model_chooses_the_pairs_of_online_dpo_and_its_scorer_may_be_killed(terminals: Terminals) -> None:
    home = terminals.directory("run")
    model = save_model(home / "rm", scores=True)
    recipe = write_recipe(
        home,
        rewards=[{"kind": "reward_model", "path": "rm"}],
        algorithm={"preset": "online_dpo"},
        learner={"steps": STEPS},
        workers={"count": 1},
    )
    headway, run = terminals.open("run", "run", str(recipe)), home / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        found = watch.until("it has scored", lambda status: any(queue.answered for queue in status.scoring))
        (scorer,) = found.scorers
        os.kill(scorer.pid, signal.SIGKILL)
        assert found.announced is None or found.announced.step < STEPS - 2, "there are samples left to score"
    headway.succeeds()
    assert (run / LOG).read_text().count("reward_model holds") == 2, "the supervisor has started it again"
    check_trained(run, steps=STEPS, trajectories_per_step=8, max_lag=2)
    for line in lines(run / "trained.jsonl"):
        pairs = []
        for group in taken(run, line["step"], count=4):
            scores = {
                str(one.tid): score_of(model, [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()])
                for one in group
            }
            assert scores == pytest.approx({str(one.tid): one.reward for one in group}, abs=1e-4)
            pairs += [max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)]
        assert sorted(line["tids"]) == sorted(pairs)


def taken(run: Path, step: int, *, count: int) -> list[tuple[Trajectory, ...]]:
    """Return the samples of each of the step's groups, as the learner logged them."""
    groups = ExperienceLog(run / "experience").read(step) or ()
    return [tuple(group.trajectories) for group in groups[:count]]
